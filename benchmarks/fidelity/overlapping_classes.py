"""A task that no model of its kind can fit: 100 classes that overlap in 4 dimensions; see `skewed_slow_workers.py`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

CLASSES, DIMENSIONS, SPREAD, SAMPLES = 100, 4, 2.0, 100  # samples of each class, to train and to test


def overlapping_classes() -> pl.Task:
    """A linear model, which is the best there is: each class is a normal distribution of deviation 1 about its mean.

    What it learns of a class depends on how often it sees the others: who sees some classes ten times as often gives them the
    samples that lie between. With 100 classes the parts of 4 workers are nearly equally large under `skewed`.
    """

    def datasets(_: object) -> tuple[TensorDataset, TensorDataset]:
        draws = torch.Generator().manual_seed(0)
        means = SPREAD * torch.randn(CLASSES, DIMENSIONS, generator=draws)
        labels = torch.arange(CLASSES).repeat_interleave(SAMPLES)
        parts = [means[labels] + torch.randn(len(labels), DIMENSIONS, generator=draws) for _ in range(2)]
        return TensorDataset(parts[0], labels), TensorDataset(parts[1], labels)

    return pl.Task(
        name="overlapping-classes",
        model=lambda: nn.Linear(DIMENSIONS, CLASSES),
        datasets=datasets,
        batch_size=128,
        learning_rate=1.0,
    )
