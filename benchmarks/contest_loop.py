"""The loop that the head to head runs, written so that `paceline advise` can be asked which of ours to take for it.

    paceline advise benchmarks/contest_loop.py:train --target-accuracy 0.96 --max-workers 4 --slow 3:10 --budget 9m

The advice makes real runs of a second or two and simulations, none to the end; what it says stands beside the table of those
who ran to the end. A simulation counts a step's time by its own clock, so the sleep that stands for a larger gradient is left
out there: it would only keep the advice waiting.
"""

from __future__ import annotations

import functools
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.membership.environment import current_environment
from paceline.tasks import load_task
from paceline.worker.memberships.entry import SimulatedEnvironment

BATCH_SIZE, EPOCHS, STEP_S = 64, 3, 0.01  # as in the head to head
LEARNING_RATE = 0.4  # there an asynchronous server has a quarter of it


@functools.cache
def datasets() -> tuple[TensorDataset, TensorDataset]:
    """MNIST; loaded once per process."""
    return load_task("mnist-mlp").load()  # type: ignore[return-value]


def accuracy(model: nn.Module) -> float:
    """Share of the test images that the model gets right."""
    images, labels = datasets()[1].tensors
    return float((model(images).argmax(dim=1) == labels).float().mean())


def train() -> None:
    """The loop of one worker."""
    torch.manual_seed(0)
    model = load_task("mnist-mlp").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(datasets()[0], batch_size=BATCH_SIZE, shuffle=True)
    sleep_s = 0.0 if isinstance(current_environment(), SimulatedEnvironment) else STEP_S
    with pl.attach(model, optimizer, evaluate=accuracy) as worker:
        for _ in range(EPOCHS):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                time.sleep(sleep_s)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                worker.report(loss)
