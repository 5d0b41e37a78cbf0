"""The quadratic on which gradient methods are slowest, with noise added, as a task; see `time_lower_bound.py`."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

DIMENSIONS = 64
TARGET = 1e-3  # of ||grad f(x)||^2; it begins at 1/16
NOISE_TO_TARGET = 16.0  # sigma^2 / TARGET, with sigma^2 = E ||gradient - grad f||^2


class WorstQuadratic(nn.Module):
    """f(x) = x^T A x / 2 - b^T x from x = 0, with A = tridiagonal(-1, 2, -1) / 4 and b = (1, 0, 0, ...) / 4.

    Each step tells a method of one coordinate more (Nesterov's example; the lower bounds on time use it with oracles that
    are noisy). A's eigenvalues lie between 0 and 1. `forward` gives a scalar whose value is ||grad f(x)||^2 and whose gradient
    is that of f, plus noise in training; inf where ||grad f||^2 is more than 1, from where no run comes back in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(DIMENSIONS))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """The scalar; the batch plays no part."""
        x = self.x.detach()
        gradient = x / 2
        gradient[1:] -= x[:-1] / 4
        gradient[:-1] -= x[1:] / 4
        gradient[0] -= 0.25
        value = torch.dot(gradient, gradient)
        if not self.training:
            return value
        if value > 1:
            value = torch.full_like(value, torch.inf)
        deviation = (NOISE_TO_TARGET * TARGET / DIMENSIONS) ** 0.5
        pull = torch.dot(self.x, gradient.add_(torch.randn(DIMENSIONS), alpha=deviation))
        return value + (pull - pull.detach())


def worst_quadratic() -> pl.Task:
    """Its accuracy is 1 once ||grad f||^2 is at most the target; evaluated every WORST_QUADRATIC_EVERY gradients."""

    def datasets(_: object) -> tuple[TensorDataset, TensorDataset]:
        epoch = torch.zeros(4 * int(os.environ["WORST_QUADRATIC_EVERY"]), 1)
        return TensorDataset(epoch, epoch), TensorDataset(epoch[:1], epoch[:1])

    return pl.Task(
        name="worst-quadratic",
        model=WorstQuadratic,
        datasets=datasets,
        loss=lambda output, _: output,
        accuracy=lambda output, _: (output <= TARGET).float(),
        batch_size=1,
    )
