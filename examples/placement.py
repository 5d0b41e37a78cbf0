"""A model with two towers on two workers, one of which is three times slower: python examples/placement.py.

It prints the plan, how long a step was predicted to take, and how long it took on real processes; then the same for all of the
model on one worker, and for an even split, half of the work each. It runs them in turn, three times each, because a computer
that does something else for some seconds would slow down only one of them.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl

BATCH, STEPS, SLOW, ROUNDS = 32, 12, {1: 3.0}, 3


class TwoTowers(nn.Module):
    """A deep tower and a shallow one, which are joined at the end."""

    def __init__(self):
        super().__init__()
        self.deep = tower(4)
        self.shallow = tower(1)
        self.head = nn.Linear(2 * 24 * 4 * 4, 10)

    def forward(self, x):
        """Of images (n, 3, 32, 32), the ten classes' scores (n, 10)."""
        return self.head(torch.cat([self.deep(x), self.shallow(x)], dim=1))


def tower(depth):
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())


def model():
    torch.manual_seed(0)
    return TwoTowers(), torch.randn(BATCH, 3, 32, 32)


def train(plan, folder):
    part = plan.part(model()[0])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(STEPS * BATCH, 3, 32, 32), torch.randint(0, 10, (STEPS * BATCH,)))
    times = []
    with pl.attach(part, optimizer) as worker:
        for x, y in worker.batches(torch.utils.data.DataLoader(data, batch_size=BATCH)):
            begun_s = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(part(x), y)
            loss.backward()
            times.append(time.perf_counter() - begun_s)
            optimizer.step()
            worker.report(loss)
    (Path(folder) / f"{worker.worker_id}.txt").write_text(str(statistics.median(times[2:])))


def measured_s(plan):
    """Seconds of a step's forward and backward pass on real processes: the median, of the worker that takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        pl.launch(partial(train, plan, folder), workers=2, plan=plan, slow=SLOW)
        return max(float(path.read_text()) for path in Path(folder).iterdir())


if __name__ == "__main__":
    plan = pl.place(*model(), devices=2, slow=SLOW)
    print(plan.explain(), end="\n\n")
    equal = plan.again(devices=[pl.Device()] * 2, placer="balanced")  # the first half of the work, and the second
    others = {
        "the plan": plan,
        "all on one": plan.again(placer="all-on-one"),
        "even split": plan.again(
            device_of={group.name: equal.device_of[group.nodes[0]] for group in plan.problem.groups}
        ),
    }
    taken_s = {name: [] for name in others}
    for _ in range(ROUNDS):
        for name, one in others.items():
            taken_s[name].append(measured_s(one))
    for name, one in others.items():
        measured_ms = statistics.median(taken_s[name]) * 1e3
        print(f"{name:10}  predicted {one.makespan_s * 1e3:7.1f} ms  measured {measured_ms:7.1f} ms")
