"""A small task for replays, and runs of it."""

import re
import shutil

import pytest

import paceline as pl
from paceline.run.recorded_order import ReplayMismatchError

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl


def datasets(folder):
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    return data, data


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def task():
    return pl.Task(name="signs", model=model, datasets=datasets, batch_size=8, learning_rate=0.05, epochs=2)
"""


# Tables whose gradients are rows, some of them of several samples of a batch.
SPARSE_TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

SIZES = (7000, 3000)


def datasets(folder):
    draw = torch.Generator().manual_seed(0)
    pairs = torch.stack([torch.randint(size, (2000,), generator=draw) for size in SIZES], 1)
    data = TensorDataset(pairs, (pairs.sum(1) % 2).float())
    return data, data


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = (nn.Embedding(size, 4, sparse=True) for size in SIZES)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, pairs):
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1) + self.bias


def task():
    loss = F.binary_cross_entropy_with_logits
    return pl.Task(
        name="pairs", model=Pairs, datasets=datasets, loss=loss, accuracy=None, batch_size=128, learning_rate=3.0, epochs=2
    )
"""


def write_task(folder, text=TASK):
    path = folder / "signs.py"
    path.write_text(text)
    return f"{path}:task"


def trained(folder, task, algorithm, **named):
    named = {"workers": 3, "backend": "threads", "momentum": 0.9, **named}
    pl.train(pl.TrainConfig(task=task, algorithm=algorithm, **named), out=folder)
    return folder


def simulated(folder, task, algorithm, *, cluster=None, faults=None, **named):
    """A simulated run, in which nothing is left to chance, in the folder of a real one."""
    named = {"workers": 3, **named}
    config = pl.TrainConfig(task=task, algorithm=algorithm, **named)
    cluster = cluster or pl.Cluster(workers=config.workers, slowness=((0, 1.7), (1, 2.9)))
    run = pl.simulate_task(config, cluster=cluster, faults=faults)
    run.config["backend"] = "processes"
    run.save(folder)
    return folder


def rewrite(folder, change):
    """A copy of the run beside it, changed by `change(run)`."""
    run = pl.RunData.load(folder)
    change(run)
    other = folder.parent / "changed"
    shutil.rmtree(other, ignore_errors=True)
    run.save(other)
    return other


def check_noticed(folder):
    """The order in `folder` differs from the run's, and the refusal names nothing of the simulator."""
    with pytest.raises(
        (ReplayMismatchError, pl.UsageError), match=r"differs from the run|contradict each other"
    ) as caught:
        pl.RecordedRun(folder).replay()
    assert not re.search("virtual|Deadlock", str(caught.value))
