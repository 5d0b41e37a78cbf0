"""A recommender whose tables have sparse gradients, its loop, and the same in one process: a slow reference."""

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import paceline as pl

ROWS, WIDTH, SIZE = 60, 3, 4


class Recommender(nn.Module):
    """Tables and a dense part. `mixed`: a table whose gradient is dense in some batches, which few optimizers take."""

    def __init__(self, mixed=True, tied="", bags=False, dtype=torch.float64, **options):
        super().__init__()
        self.is_mixed = mixed
        torch.manual_seed(0)
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True, **options)
        kind = partial(nn.EmbeddingBag, mode="mean") if bags else nn.Embedding
        self.items = kind(ROWS, WIDTH, sparse=True)
        self.bias = nn.Embedding(ROWS, 1, sparse=True)
        self.unused = nn.Embedding(ROWS, 2, sparse=True)
        self.score = nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, ROWS)
        self.to(dtype)
        if tied == "tables":
            self.items.weight = self.users.weight
        elif tied == "output":
            self.head.weight = self.users.weight

    def loss(self, number, pairs):
        """The mean over a batch's samples; some batches leave out tables, some the dense part, some a table's rows."""
        users, items = (
            self.users(pairs[:, 0]),
            self.items(pairs[:, 1:] if self.items.__class__ is nn.EmbeddingBag else pairs[:, 1]),
        )
        match number % 6:
            case 0:
                scores = self.score(torch.cat([users, items], 1)) + self.bias(pairs[:, 2])
            case 1:
                scores = users.sum(1, keepdim=True) + self.bias(pairs[:0, 2]).sum()
            case 2:
                scores = self.score(torch.ones(len(pairs), 2 * WIDTH, dtype=users.dtype))
            case 3:
                scores = items.sum(1, keepdim=True) + (
                    self.bias.weight[pairs[:, 0]] if self.is_mixed else self.bias(pairs[:, 0])
                )
            case 4:
                scores = self.bias(torch.arange(ROWS)).mean() + users[:, :1]
            case _:
                scores = self.head(items).square().mean(1, keepdim=True) + users[:, :1]
        return (scores.squeeze(1) - (pairs[:, 0] - pairs[:, 1]).sign()).square().mean()


def batches(number, *, uneven):
    """Users repeat within a batch; the last one of `uneven` batches lacks a sample."""
    draw = torch.Generator().manual_seed(3)
    return [
        (
            n,
            torch.stack(
                [
                    torch.randint(0, high, (SIZE - (uneven and n == number - 1),), generator=draw)
                    for high in (5, ROWS, ROWS)
                ],
                1,
            ),
        )
        for n in range(number)
    ]


def split(model):
    tables = [model.users.weight, model.bias.weight, model.unused.weight]
    tables += [model.items.weight] if model.items.weight is not model.users.weight else []
    return tables, [one for one in model.parameters() if not any(one is table for table in tables)]


def by(tables, others=None):
    """Makes optimizers: one for all, or another for what is dense."""

    def make(model):
        if others is None:
            return [tables(model.parameters())]
        return [kind(list(of)) for kind, of in zip((tables, others), split(model), strict=True)]

    return make


SGD = partial(torch.optim.SGD, lr=0.3)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.02)
OPTIMIZERS = {
    "sgd": by(SGD),
    "momentum": by(MOMENTUM),
    "nesterov": by(partial(MOMENTUM, nesterov=True)),
    "adagrad": by(partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1)),
    "sgd and adamw": by(SGD, ADAMW),
    "adagrad and decayed momentum": by(partial(torch.optim.Adagrad, lr=0.1), partial(MOMENTUM, weight_decay=0.1)),
    "sparse adam and adamw": by(partial(torch.optim.SparseAdam, lr=0.02), ADAMW),
}


def gradient_of(parameter):
    """A parameter's gradient with its layout and rows."""
    gradient = parameter.grad
    if gradient is None or gradient.layout == torch.strided:
        return None if gradient is None else gradient.clone(), None
    gradient = gradient.coalesce()
    return gradient.values().clone(), gradient.indices()[0].tolist()


@dataclass
class Loop:
    """A worker's loop; returns its parameters, the last gradients, and the optimizers' state.

    Args:
        optimizer: of `OPTIMIZERS`.
        number: of batches.
        clip: the largest norm.
        passes: backward passes before a step.
        marked: whether all but the last are in `worker.accumulate()`.
        infinite: the batch whose loss is infinite, with a GradScaler; -1: none; None: there is no scaler.
        own: the loop fetches its own batches.
        epochs: how often it uses all batches.
        folder: where it also saves what it returns, by worker.
    """

    optimizer: str = "sgd"
    number: int = 24
    clip: float | None = None
    passes: int = 1
    marked: bool = False
    infinite: int | None = None
    own: bool = False
    epochs: int = 1
    model: dict | None = None
    folder: Path | None = None

    def __call__(self):
        model = Recommender(**{"mixed": self.optimizer in ("sgd", "adagrad")} | (self.model or {}))
        optimizers, done = OPTIMIZERS[self.optimizer](model), 0
        scaler = None if self.infinite is None else torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        with pl.attach(model, optimizers if len(optimizers) > 1 else optimizers[0]) as worker:
            data = batches(self.number, uneven=self.passes == 1)
            if self.own:
                data = data[worker.worker_id :: worker.num_workers]
            for _ in range(self.epochs):
                for number, pairs in data if self.own else worker.batches(data):
                    if not done:
                        for one in optimizers:
                            one.zero_grad()
                    loss = model.loss(number, pairs) * (math.inf if number == self.infinite else 1.0)
                    done += 1
                    with worker.accumulate() if self.marked and done < self.passes else contextlib.nullcontext():
                        (loss if scaler is None else scaler.scale(loss)).backward()
                    if done == self.passes:
                        done = 0
                        self.step(worker, optimizers, scaler)
        result = ended(model, optimizers)
        if self.folder is not None:
            torch.save(result, self.folder / f"{worker.worker_id}.pt")
        return result

    def step(self, worker, optimizers, scaler):
        for one in optimizers:
            if scaler is not None and self.clip is not None:
                scaler.unscale_(one)
        if self.clip is not None:
            worker.clip_grad_norm_(self.clip)
        for one in optimizers:
            one.step() if scaler is None else scaler.step(one)
        if scaler is not None:
            scaler.update()

    def alone(self, *workers):
        """The same in one process; `workers`: how many there are, by epoch."""
        model, data = (
            Recommender(**{"mixed": self.optimizer in ("sgd", "adagrad")} | (self.model or {})),
            batches(self.number, uneven=self.passes == 1),
        )
        optimizers = OPTIMIZERS[self.optimizer](model)
        rounds = [data[n : n + size] for size in workers for n in range(0, len(data), size)]
        for first in range(0, len(rounds), self.passes):
            for one in optimizers:
                one.zero_grad()
            passes = rounds[first : first + self.passes]
            for own in passes:
                samples = sum(len(pairs) for _, pairs in own)
                for number, pairs in own:
                    (model.loss(number, pairs) * len(pairs) / samples).backward()
            if self.clip is not None:
                clip(list(model.parameters()), self.clip)
            if not any(number == self.infinite for own in passes for number, _ in own):
                for one in optimizers:
                    one.step()
        return ended(model, optimizers)


def clip(parameters, most):
    gradients = [one.grad.to_dense() for one in parameters if one.grad is not None]
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    for one in parameters:
        if one.grad is not None:
            one.grad = one.grad * (most / (norm + 1e-6)).clamp(max=1.0)


def ended(model, optimizers):
    parameters = [one.detach().clone() for one in model.parameters()]
    states = [
        {name: value.to_dense() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for one in optimizers
        for state in one.state_dict()["state"].values()
    ]
    return parameters, [*map(gradient_of, model.parameters())], states
