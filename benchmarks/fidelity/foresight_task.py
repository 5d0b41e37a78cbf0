"""mnist-mlp whose forward pass sleeps before it computes, so that more workers than cores can be busy.

FORESIGHT_SLEEPS names a file: seconds per step of each worker, separated by blanks; the last one is that of all further
workers. A file, since workers inherit the variables that the program began with.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment
from paceline.tasks.load import load_task


class Sleeping(nn.Module):
    """A model that sleeps before it computes, in workers and while training only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_task("mnist-mlp").model()
        environment = current_environment()
        self.sleep_s = 0.0
        if environment is not None:
            sleeps_s = [float(one) for one in Path(os.environ["FORESIGHT_SLEEPS"]).read_text().split()]
            self.sleep_s = sleeps_s[min(environment.worker_id, len(sleeps_s) - 1)]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's outputs, later."""
        if self.training and self.sleep_s:
            time.sleep(self.sleep_s)
        return self.model(images)


def task() -> pl.Task:
    """`mnist-mlp`, with sleeps."""
    mnist = load_task("mnist-mlp")
    return pl.Task(name="mnist-mlp, sleeping", model=Sleeping, datasets=mnist.load, batch_size=64, learning_rate=0.01)
