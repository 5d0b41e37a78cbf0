"""Loops with a loss of their own under every layout come to what one process comes to with all workers' rows, in float64."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from chosen import each_value
from model_parallel.tensor import losses
from paceline import model_parallel as mp

STEPS, PASSES = 3, 2
LAYOUTS = [
    *((pl.TensorParallel(line=workers), workers, 1) for workers in (2, 4)),
    (pl.TensorParallel(line=2), 4, 2),
    (pl.TensorParallel(q=1, depth=2), 2, 1),
    (pl.TensorParallel(q=2), 4, 1),
    (pl.TensorParallel(q=2, mode="summa"), 8, 2),
    (pl.TensorParallel(q=2, depth=2), 8, 1),
]


def on_mesh(layout, replicas, loss_of, out):
    mesh = mp.Mesh.alone()
    model = losses.Net(mesh).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pl.attach(model, optimizer, "all-reduce", layout=layout) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = torch.tensor(0.0)
            for number in range(PASSES):
                batch = (step * PASSES + number) * replicas + worker.worker_id * replicas // worker.num_workers
                loss = loss_of(model, losses.Batch(mesh, batch)) / PASSES
                loss.backward()
            worker.clip_grad_norm_(1.0)
            worker.report(mesh.mean(loss))
            optimizer.step()
    torch.save(model.state_dict(), Path(out) / f"{worker.worker_id}.pt")


def alone(replicas, loss_of):
    """The mean over all replicas' rows, without `attach`."""
    model = losses.Net(mp.Mesh.alone()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(PASSES * replicas):
            batch = losses.Batch(model.mesh, step * PASSES * replicas + number)
            (loss_of(model, batch) / PASSES / replicas).backward()
        mp.clip_grad_norm(model, 1.0)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("cut", "loss"),
    each_value(LAYOUTS, [losses.mean_square, losses.all_together, losses.weighted_with_penalties]),
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_on_a_mesh(cut, loss, tmp_path):
    """`tensor/test_losses.py` has every loss on each kind of mesh."""
    layout, workers, replicas = cut
    pl.launch(partial(on_mesh, layout, replicas, loss, tmp_path), workers=workers, backend="threads")
    expected = alone(replicas, loss)
    for worker in range(workers):
        found = torch.load(tmp_path / f"{worker}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


ROWS = 8  # of a worker
_building = threading.Lock()  # threads share PyTorch's generator


def towers():
    with _building:
        torch.manual_seed(4)
        return _towers()


def _towers():
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)
    ).double()


def rows(number, size=ROWS):
    draw = torch.Generator().manual_seed(number)
    made = {"generator": draw, "dtype": torch.float64}
    x, target, weights = torch.randn(size, 6, **made), torch.randn(size, 4, **made), torch.rand(size, 1, **made)
    return x, target, torch.randint(4, (size,), generator=draw), weights


def mean_square(model, x, target, labels, weights):
    return F.mse_loss(model(x), target)


def cross_entropy(model, x, target, labels, weights):
    return F.cross_entropy(model(x), labels)


def sum_of_squares(model, x, target, labels, weights):
    return F.mse_loss(model(x), target, reduction="sum")


def weighted_with_penalties(model, x, target, labels, weights):
    penalty = sum(one.square().sum() for one in model.parameters())
    return (weights * (model(x) - target).abs()).mean() + 0.01 * penalty


def in_groups(layout, loss_of, sizes, out):
    model = towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pl.attach(model, optimizer, "all-reduce", layout=layout) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(PASSES):
                batch = rows((step * PASSES + number) * worker.num_workers + worker.worker_id, sizes[worker.worker_id])
                (loss_of(model, *batch) / PASSES).backward()
            worker.clip_grad_norm_(1.0)
            optimizer.step()
    torch.save(model.state_dict(), Path(out) / f"{worker.worker_id}.pt")


def of_all(loss_of, sizes):
    """The mean of the workers' losses, each weighted by its rows, in one process."""
    model = towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(PASSES):
            for worker, size in enumerate(sizes):
                batch = rows((step * PASSES + number) * len(sizes) + worker, size)
                (loss_of(model, *batch) / PASSES * size / sum(sizes)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("loss", "groups"), each_value([mean_square, cross_entropy, sum_of_squares, weighted_with_penalties], [2, 4, 1])
)
@pytest.mark.parametrize(("pairing", "sizes"), [("gather", (8, 4, 2, 6)), ("column-row", (8, 8, 8, 8))], ids=str)
def test_in_groups(groups, pairing, loss, sizes, tmp_path):
    layout = pl.HybridParallel(groups=groups, layers="2-4", pairing=pairing)
    pl.launch(partial(in_groups, layout, loss, sizes, tmp_path), workers=4, backend="threads")
    expected = of_all(loss, sizes)
    for worker in range(4):
        found = torch.load(tmp_path / f"{worker}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("layout", [pl.TensorParallel(q=1, depth=2), pl.HybridParallel(groups=1, layers="0")], ids=str)
def test_grad_scaler_is_refused_as_one_worker_would_find_an_infinity_by_itself(layout):
    def train():
        mesh = mp.Mesh.alone()
        is_mesh = isinstance(layout, pl.TensorParallel)
        model = mp.Linear(6, 4, mesh) if is_mesh else nn.Sequential(nn.Linear(6, 4))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        with pl.attach(model, optimizer, "all-reduce", layout=layout):
            scaler.scale(model(torch.ones(2, 6)).sum()).backward()
            scaler.step(optimizer)

    with pytest.raises(pl.UsageError, match="leave out GradScaler"):
        pl.launch(train, workers=2, backend="threads")
