"""Models that are placed in tests, each with an example and where its modules go, and the loop that trains them."""

import os
import signal
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.records.checkpoint_files import newest_or_none

BATCH, STEPS, LONG_STEPS = 6, 5, 20_000


def block(n_in=8, n_out=8):
    return nn.Sequential(nn.Linear(n_in, n_out), nn.Tanh())


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = block(), block(), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = block(), block(), block(), nn.Linear(8, 3)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a) + a
        c = self.c(b) + a
        return self.d(c + b)


class BackAndForth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = block(), block(), nn.Linear(8, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class ReadByThree(nn.Module):
    """One tensor with readers on three devices, whose gradients are added up in the order of one process."""

    def __init__(self):
        super().__init__()
        self.a = block()
        self.u, self.v, self.w = block(), block(), block()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        a = self.a(x)
        return self.head(self.u(a) * self.v(a) + self.w(a))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(7, 8), block()
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x).mean(1)
        return self.out(self.middle(h) + h)


class Attention(nn.Module):
    """A transformer's block: queries, keys, values and what goes past them read one tensor."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 32), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.embed(x).unflatten(1, (4, 8)))
        seen = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return self.head((h + self.out(seen)).mean(1))


class Returned(nn.Module):
    """The loss reads a tensor that two others read, too."""

    def __init__(self):
        super().__init__()
        self.a, self.u, self.v = block(8, 3), block(3, 3), block(3, 3)

    def forward(self, x):
        a = self.a(x)
        return a, self.u(a) * self.v(a)


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = block(), block(), nn.Linear(16, 3)
        self.drop_a, self.drop_b = nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, x):
        return self.head(torch.cat([self.drop_a(self.a(x)), self.drop_b(self.b(x))], 1))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = block(), block(), nn.Linear(8, 3)
        self.norm_a, self.norm_b = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.head(self.norm_a(self.a(x)) + self.norm_b(self.b(x)))


#: By name: the model, and the device of each module in a plan for two workers and for three.
CASES = {
    "two towers": (TwoTowers, {"a": 0, "b": 1, "head": 0}, {"a": 2, "b": 1, "head": 0}),
    "skips": (Skips, {"a": 0, "b": 1, "c": 0, "d": 1}, {"a": 0, "b": 1, "c": 2, "d": 1}),
    "0-1-0": (BackAndForth, {"a": 0, "b": 1, "c": 0}, {"a": 2, "b": 1, "c": 2}),
    "read by three": (ReadByThree, {"a": 0, "u": 0, "v": 1, "w": 1, "head": 0}, {"a": 0, "u": 0, "v": 1, "w": 2, "head": 2}),
    "tied embedding": (
        Tied, {"embedding": 1, "middle": 0, "out": 1}, {"embedding": 1, "middle.0": 0, "middle.1": 2, "out": 1},
    ),
    "attention": (
        Attention,
        {"embed": 0, "norm": 0, "q": 1, "k": 0, "v": 1, "out": 0, "head": 1},
        {"embed": 0, "norm": 0, "q": 1, "k": 2, "v": 0, "out": 1, "head": 1},
    ),
    "returned": (Returned, {"a": 0, "u": 1, "v": 0}, {"a": 0, "u": 1, "v": 2}),
    "dropout": (WithDropout, {"a": 0, "drop_a": 0, "b": 1, "head": 1}, {"a": 0, "drop_a": 1, "b": 2, "head": 1}),
    "batch norm": (Normed, {"a": 0, "norm_a": 1, "b": 1, "norm_b": 0, "head": 0}, {"a": 0, "norm_a": 1, "b": 2, "head": 1}),
}  # fmt: skip


def made(name, dtype=torch.float64):
    torch.manual_seed(5)
    return CASES[name][0]().to(dtype)


def data(name, dtype=torch.float64, steps=STEPS):
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(steps * BATCH, 8, generator=draw, dtype=dtype)
    if name == "tied embedding":
        x = torch.randint(0, 7, (steps * BATCH, 4), generator=draw)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (steps * BATCH,), generator=draw))


@cache  # a plan does not change, and no test changes the times that it is made of
def planned(name, workers, dtype=torch.float64, **options):
    pins = CASES[name][workers - 1] if workers > 1 else {}
    example = data(name, dtype)[:BATCH][0]
    # The times of such small models say nothing; where they go is pinned.
    return pl.place(made(name, dtype), example, devices=workers, pins=pins, repeats=1, force=True, seed=3, **options)


def contrary(plan):
    """The same plan with a global order as far from the model's as can be: of the groups that could run, the last."""
    earlier, order = plan.problem.earlier, []
    while len(order) < len(earlier):
        order.append(max(g for g, before in enumerate(earlier) if g not in order and before <= set(order)))
    return replace(plan, placement=replace(plan.placement, order=tuple(order)))


def steps_of(model, optimizer, batches, report=lambda loss: None):
    """Losses and all gradients of each step."""
    seen = []
    for x, y in batches:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out[0] + out[1] if isinstance(out, tuple) else out, y)
        loss.backward()
        report(loss)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen.append((loss.item(), gradients, getattr(model, "transfers", ())))
        optimizer.step()
    return seen


def alone(name, dtype=torch.float64, epochs=1, plan=None):
    """The same training in one process: the model itself, or, where it draws random numbers, all of a plan on one device."""
    model = made(name, dtype)
    called = plan.part(model) if plan is not None else model
    optimizer = torch.optim.Adam(called.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(name, dtype), batch_size=BATCH)
    seen = [one for _ in range(epochs) for one in steps_of(called, optimizer, loader)]
    return seen, model


def train(name, plan, folder, dtype=torch.float64, epochs=1, shuffle=False):
    part = plan.part(made(name, dtype))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(name, dtype), batch_size=BATCH, shuffle=shuffle)
    seen = []
    with pl.attach(part, optimizer) as worker:
        for _ in range(epochs):
            seen += steps_of(part, optimizer, worker.batches(loader), worker.report)
    torch.save((seen, part.whole.state_dict()), Path(folder) / f"{worker.worker_id}.pt")


def placed(name, plan, folder, dtype=torch.float64, **options):
    """The run, and by worker: what it saw in each step, and the model that it ended with."""
    loop = partial(train, name, plan, folder, dtype, **options.pop("loop", {}))
    run = pl.launch(loop, workers=plan.workers, plan=plan, **options)
    return run, [torch.load(Path(folder) / f"{w}.pt", weights_only=False) for w in range(plan.workers)]


def is_saved(out):
    """Whether a run, if it has a folder, has something to go on from: a supervisor that waits for a core completes it late."""
    return out is None or newest_or_none(out / "checkpoint") is not None


def train_killed(name, plan, out, worker_id, at_step, signal_number, epochs):
    """As `train`, but one worker ends itself, or stops, in the middle of a step: that, or the same of a later epoch."""
    part = plan.part(made(name))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(name), batch_size=BATCH)
    count = 0
    with pl.attach(part, optimizer) as worker:
        for _ in range(epochs):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(part(x), y)
                count += 1
                is_due = count >= at_step and (count - at_step) % STEPS == 0
                if worker.worker_id == worker_id and is_due and is_saved(out):
                    os.kill(os.getpid(), signal_number)
                loss.backward()
                optimizer.step()


def train_long(plan, folder, out=None, more=None):
    """One epoch of many steps: worker 1 is killed once a checkpoint is there, or all leave the loop after `more` steps."""
    part = plan.part(made("two towers"))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    with pl.attach(part, optimizer) as worker:
        for at, (x, y) in enumerate(worker.batches(long_loader())):
            if at == more:
                break
            if out is not None and worker.worker_id == 1 and is_saved(out):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            F.cross_entropy(part(x), y).backward()
            optimizer.step()
    torch.save(part.whole.state_dict(), Path(folder) / f"{worker.worker_id}.pt")


def long_loader():
    return torch.utils.data.DataLoader(data("two towers", steps=LONG_STEPS), batch_size=BATCH)
