"""mnist-mlp whose forward pass takes a given time more: a sleep, so that a slow worker frees no core for the others.

Set SLOW_STEP_S, seconds per step, and SLOW_FACTOR, by how much worker 0 is slower.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import paceline as pl
from paceline.environment import current_environment
from paceline.tasks.load import load_task


class Slowed(nn.Module):
    """A model that sleeps before it computes, in workers and while training only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_task("mnist-mlp").model()
        environment = current_environment()
        self.step_s = 0.0
        if environment is not None:
            factor = float(os.environ["SLOW_FACTOR"]) if environment.worker_id == 0 else 1.0
            self.step_s = float(os.environ["SLOW_STEP_S"]) * factor

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's outputs, later."""
        if self.training:
            time.sleep(self.step_s)
        return self.model(images)


def task() -> pl.Task:
    """`mnist-mlp`, slowed."""
    mnist = load_task("mnist-mlp")
    return pl.Task(name="mnist-mlp, slowed", model=Slowed, datasets=mnist.load, batch_size=64, learning_rate=0.1)
