"""Loops that real workers run, and replays repeat."""

import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.membership.environment import current_environment

# The beginning of a file with tasks.
SIGNS = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

HERE = Path(__file__).parent


def datasets(folder):
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    return data, data


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
"""

SAMPLES, BATCH_SIZE = 160, 8
BUILDING = threading.Lock()  # worker threads share PyTorch's generator: each must draw its model alone


def data():
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def trained(
    *,
    learning_rate=0.05,
    data_set=data,
    epochs=2,
    noise=lambda: 0.0,
    per_step=1,
    reports="before",
    algorithm=None,
    own=False,
    dropout=0.2,
    dies_at=0,
    leaves=False,
    sums=False,
    processes=0,
    keeps_processes=False,
    step_begins=lambda worker: None,
    step_ends=lambda worker: None,
    loop_ends=lambda worker: None,
):
    """Dropout, momentum, and a clipped gradient."""
    with BUILDING:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    loader = DataLoader(
        data_set(), batch_size=BATCH_SIZE, shuffle=True, num_workers=processes, persistent_workers=keeps_processes
    )
    with pl.attach(model, optimizer, algorithm) as worker:
        for _ in range(0 if leaves and worker.worker_id else epochs):
            for number, (x, y) in enumerate(loader if own else worker.batches(loader), 1):
                step_begins(worker)
                loss = nn.functional.cross_entropy(model(x) * (1.0 + noise()), y)
                loss.backward()
                if worker.worker_id and number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number % per_step:
                    continue
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                if sums:
                    optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, worker.mean(loss.item()))
                if reports == "before":
                    worker.report(loss)
                optimizer.step()
                optimizer.zero_grad()
                if reports == "after":
                    worker.report(loss)
                step_ends(worker)
        loop_ends(worker)


def plain():
    trained()


def reports_late():
    trained(reports="after")


def fetches_own():
    trained(own=True)


def loads_in_processes():
    """As each epoch begins, the loader draws a seed for its processes from the generator that dropout uses."""
    trained(processes=1)


def keeps_loading_in_processes():
    """Such a loader draws in its first epoch only."""
    trained(processes=1, keeps_processes=True)


def faster_late():
    trained(learning_rate=0.050001, reports="after")


def leaves():
    """Worker 1 ends without a step."""
    trained(leaves=True)


def diverges_early():
    """Some worker reports before its step, and so leaves a batch without a record."""
    diverges(reports="before")


def faster():
    trained(learning_rate=0.050001)


def longer():
    trained(epochs=1000)


def shorter():
    trained(epochs=1)


def swapped():
    """Two samples have each other's labels."""
    x, y = data().tensors
    ones = (y == 1).nonzero()[0].item()
    zeros = (y == 0).nonzero()[0].item()
    y[ones], y[zeros] = 0, 1
    trained(data_set=lambda: TensorDataset(x, y))


def reordered():
    x, y = data().tensors
    trained(data_set=lambda: TensorDataset(x.flip(0), y.flip(0)))


def draws():
    """Python's generator begins in another state in each process."""
    trained(noise=random.random)


def accumulates():
    trained(per_step=2)


def without_dropout():
    trained(dropout=0.0)


def dies():
    trained(dies_at=3)


def dies_after_its_last_batch():
    trained(loop_ends=lambda worker: _die_in_a_run())


def dies_after_its_loop():
    trained()
    _die_in_a_run()


def _die_in_a_run():
    """Ends worker 1, except in a replay."""
    if multiprocessing.parent_process() is not None and current_environment().worker_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Killed:
    """In the run, though not in a replay, processes of workers are killed at a step.

    Args:
        folder: of the run; a file beside it says that a replacement trains. Until then each step takes 50 ms more.
        at: by worker and incarnation, the step, counted by the process.
        ends: whether the step has been made.
        processes: of the loader.
    """

    folder: Path
    at: dict
    ends: bool = False
    epochs: int = 2
    sums: bool = False
    processes: int = 0
    num_steps: int = field(default=0, compare=False)

    def __call__(self):
        hook = {"step_ends" if self.ends else "step_begins": self._step}
        trained(epochs=self.epochs, sums=self.sums, processes=self.processes, **hook)

    def _step(self, worker):
        if multiprocessing.parent_process() is None:
            return
        self.num_steps += 1
        incarnation, back = worker._membership.incarnation, self.folder.with_name("back")
        if self.at.get((worker.worker_id, incarnation)) == self.num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if incarnation:
            back.touch()
        if self.epochs > 2 and not back.exists():
            time.sleep(0.05)


def names_another():
    trained(algorithm="all-reduce")


def diverges(reports="after"):
    trained(learning_rate=1e30, reports="after")
