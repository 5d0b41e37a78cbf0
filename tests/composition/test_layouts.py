"""Layouts at random: a loop whose model is cut over workers ends with what one process makes of the same batches.

Layouts are not simulated, so that these combinations run on threads, and are compared with plain PyTorch in float64.
"""

import contextlib
import threading
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from composition.loop import OPTIMIZERS
from paceline import model_parallel as mp

# A layout, its workers, and how many batches these take at a time.
LAYOUTS = [
    ("hybrid(groups=1, min_weights=1)", 2, 2),
    ("hybrid(groups=2, min_weights=1)", 4, 4),
    ("hybrid(groups=1, min_weights=1)", 4, 4),
    ("tensor(line=2)", 2, 1),
    ("tensor(line=2)", 4, 2),
    ("tensor(line=2)", 6, 3),
    ("tensor(q=2)", 4, 1),
    ("tensor(q=1, depth=2)", 4, 2),
    ("tensor(q=2, mode=summa)", 8, 2),
]


@dataclass(frozen=True)
class Case:
    """As of `composition.loop`, with a layout."""

    layout: str
    workers: int
    replicas: int
    algorithm: str
    optimizer: str
    batches: int
    rest: int  # samples of the last batch
    passes: int
    marked: bool
    clip: float | None
    scaler: bool
    frozen: bool
    epochs: int


def case(number):
    random = Random(number)
    layout, workers, replicas = random.choice(LAYOUTS)
    passes = random.choice([1, 1, 2, 3])
    marked = random.random() < 0.5
    # Marked passes are one batch for a replica, unless layers are cut: then no step is that of one process over uneven rounds.
    uneven = (passes == 1 or not marked or "hybrid" in layout) and random.random() < 0.5
    algorithm = random.choice(
        ["all-reduce"] * 3 + (["lockstep", "all-reduce(sharded=true)"] if "tensor" in layout else [])
    )
    return Case(
        layout, workers, replicas,
        algorithm=algorithm,
        optimizer=random.choice(["adagrad"] + ["sgd", "momentum", "nesterov", "adamw"] * 4),
        batches=replicas * passes * random.randint(2, 3) - (random.randrange(replicas) if uneven else 0),
        rest=random.choice([4, 8]) if uneven else 8,
        passes=passes,
        marked=marked,
        # Under lockstep each worker clips its own gradient, which a warning says.
        clip=random.choice([None, None, 0.5, 20.0]) if algorithm != "lockstep" else None,
        scaler=random.random() < 0.1,
        frozen=random.random() < 0.3,
        epochs=random.randint(1, 2),
    )  # fmt: skip


def built(one, mesh):
    """A model that the layout can cut, always with the same parameters."""
    torch.manual_seed(1)
    if one.layout.startswith("hybrid"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    else:
        model = nn.Sequential(mp.Linear(4, 8, mesh), nn.Tanh(), mp.Linear(8, 4, mesh, cut="inputs"))
    if one.frozen:
        model[0].weight.requires_grad_(False)
    return model.double()


def loader(one):
    draw = torch.Generator().manual_seed(2)
    made = {"generator": draw, "dtype": torch.float64}
    data = TensorDataset(*torch.randn(2, 8 * (one.batches - 1) + one.rest, 4, **made))
    return DataLoader(data, batch_size=8)


def step(model, optimizer, scaler, clip, by):
    if clip is not None:
        scaler.unscale_(optimizer)
        by(model, clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def train(one, found, lock):
    """The loop of each worker."""
    mesh = mp.Mesh.alone()
    with lock:  # threads share torch's generator
        model = built(one, mesh)
    optimizer = OPTIMIZERS[one.optimizer]([p for p in model.parameters() if p.requires_grad], 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=one.scaler)
    with pl.attach(model, optimizer, one.algorithm, layout=one.layout) as worker:
        number = 0
        for _ in range(one.epochs):
            for x, y in worker.batches(loader(one)):
                x, y = (mesh.local_features(mesh.local_batch(part)) for part in (x, y))
                is_last = (number + 1) % one.passes == 0
                loss = nn.functional.mse_loss(model(x), y)
                with worker.accumulate() if one.marked and not is_last else contextlib.nullcontext():
                    scaler.scale(loss / one.passes).backward()
                number += 1
                if is_last:
                    step(model, optimizer, scaler, one.clip, lambda _, clip: worker.clip_grad_norm_(clip))
    with lock:
        found[worker.worker_id] = {name: value.clone() for name, value in model.state_dict().items()}


def expected(one):
    """One process, whose batch is all that the workers have in a round."""
    model = built(one, mp.Mesh.alone())
    optimizer = OPTIMIZERS[one.optimizer]([p for p in model.parameters() if p.requires_grad], 0.05)
    batches = list(loader(one))
    number = 0
    for _ in range(one.epochs):
        for first in range(0, len(batches), one.replicas):
            x, y = (torch.cat(parts) for parts in zip(*batches[first : first + one.replicas], strict=True))
            (nn.functional.mse_loss(model(x), y) / one.passes).backward()
            number += 1
            if number % one.passes == 0:
                if one.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), one.clip)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def refused(one):
    """What the sentence says of a combination that is refused; None: it trains."""
    if one.scaler:
        return "leave out GradScaler|nor scale them with GradScaler"
    if one.optimizer == "adagrad":
        return "the optimizer must start without state"  # its sums do not begin at nothing
    if one.clip is not None and "sharded" in one.algorithm and one.replicas > 1:
        return "sees its own part of the mean gradient only"
    return None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", [*range(25), *(pytest.param(n, marks=pytest.mark.soak) for n in range(25, 400))])
def test_a_combination(number):
    one, found, lock = case(number), {}, threading.Lock()
    sentence = refused(one)
    with pytest.raises(pl.UsageError, match=sentence) if sentence else contextlib.nullcontext():
        pl.launch(lambda: train(one, found, lock), workers=one.workers, backend="threads")
    if sentence:
        return
    assert len(found) == one.workers
    for model in found.values():
        for name, value in expected(one).items():
            torch.testing.assert_close(model[name], value, rtol=0, atol=1e-10)
