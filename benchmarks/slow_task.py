"""mnist-mlp whose forward pass takes a given time more: a sleep, so that a slow worker frees no core for the others.

Set SLOW_STEP_S, seconds per step, and SLOW_FACTOR, by how much worker 0 is slower. With SLOW_STEPS, how many steps each worker
is expected to make, separated by commas, a worker's learning rate falls linearly to a twentieth over its last half of them.
"""

from __future__ import annotations

import math
import os
import time

import torch
from torch import nn

import paceline as pl
from paceline.membership.environment import current_environment
from paceline.tasks.load import load_task

LAST_RATE = 0.05


class Slowed(nn.Module):
    """A model that sleeps before it computes, in workers and while training only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_task("mnist-mlp").model()
        environment = current_environment()
        self.step_s, self.num_steps, self.steps_made = 0.0, math.inf, 0
        if environment is not None:
            factor = float(os.environ["SLOW_FACTOR"]) if environment.worker_id == 0 else 1.0
            self.step_s = float(os.environ["SLOW_STEP_S"]) * factor
            if "SLOW_STEPS" in os.environ:
                self.num_steps = int(os.environ["SLOW_STEPS"].split(",")[environment.worker_id])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's outputs, later; their gradient, and so the step of plain SGD, is scaled by the schedule."""
        if not self.training:
            return self.model(images)
        time.sleep(self.step_s)
        rate = max(LAST_RATE, min(1.0, 2.0 * (1.0 - self.steps_made / self.num_steps)))
        self.steps_made += 1
        outputs = self.model(images)
        return outputs.detach() + rate * (outputs - outputs.detach())


def task() -> pl.Task:
    """`mnist-mlp`, slowed."""
    mnist = load_task("mnist-mlp")
    return pl.Task(name="mnist-mlp, slowed", model=Slowed, datasets=mnist.load, batch_size=64, learning_rate=0.1)
