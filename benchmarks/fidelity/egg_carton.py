"""A problem that meets the theorem's assumptions exactly, with a known optimum, as a task; see `convergence_rate.py`."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

DIMENSIONS, NOISE = 64, 2.0


class EggCarton(nn.Module):
    """f(x) = sum_j l_j (1 - cos x_j), l from 0.5 to 1.5, from its maximum at pi on; gradients l sin x + noise.

    f >= 0, with equality where every x_j is a multiple of 2 pi; the gradient is Lipschitz with constant 1.5. From the maximum
    every coordinate may fall to either side: workers that do not agree on it end in different valleys, and their mean on a
    slope. `forward` gives a scalar whose value is ||grad f(x)||^2 and whose gradient is that of f, plus noise in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((DIMENSIONS,), torch.pi))
        self.curvatures = torch.linspace(0.5, 1.5, DIMENSIONS)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """The scalar; the batch plays no part."""
        x = self.x
        gradient = self.curvatures * x.detach().sin()
        value = gradient.square().sum()
        if not self.training:
            return value
        pull = torch.dot(x, gradient + NOISE * torch.randn(DIMENSIONS))
        return value + (pull - pull.detach())


def egg_carton() -> pl.Task:
    """The model is evaluated once per epoch, and so after EGG_CARTON_EPOCH gradients."""

    def datasets(_: object) -> tuple[TensorDataset, TensorDataset]:
        epoch = torch.zeros(int(os.environ["EGG_CARTON_EPOCH"]), 1)
        return TensorDataset(epoch, epoch), TensorDataset(epoch[:1], epoch[:1])

    return pl.Task(
        name="egg-carton",
        model=EggCarton,
        datasets=datasets,
        loss=lambda output, _: output,
        accuracy=None,
        batch_size=1,
    )
