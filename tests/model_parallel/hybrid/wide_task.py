"""A task whose linear layer holds nearly all weights, enough of them to be cut by default."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.tasks import Task


def datasets(_):
    generator = torch.Generator().manual_seed(13)
    points = torch.randn(80, 16, generator=generator)
    labels = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    return TensorDataset(points[:64], labels[:64]), TensorDataset(points[64:], labels[64:])


def wide():
    return Task(
        name="wide",
        model=lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4)),
        datasets=datasets,
        batch_size=8,
        learning_rate=0.01,
    )
