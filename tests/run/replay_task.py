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


def write_task(folder):
    path = folder / "signs.py"
    path.write_text(TASK)
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
