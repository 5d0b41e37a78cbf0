"""A task of your own for the command line: spirals that a small network must tell apart.

    paceline train --task examples/my_task.py:task --algorithm leashed --workers 2

Every option of `train` and `compare` works with it; so do `pl.train` and the report.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl


def task() -> pl.Task:
    """What `paceline train` calls, in every process; the learning rate and so on are defaults of its options."""
    return pl.Task(name="spirals", model=model, datasets=spirals, batch_size=32, learning_rate=0.3, epochs=60)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def spirals(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test sets; `data` is the folder of --data, which this task does not need."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat(1200)
    radius = torch.rand(len(labels), generator=generator)
    angle = 4 * radius + 2 * torch.pi / 3 * labels + 0.15 * torch.randn(len(labels), generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points[:3000], labels[:3000]), TensorDataset(points[3000:], labels[3000:])
