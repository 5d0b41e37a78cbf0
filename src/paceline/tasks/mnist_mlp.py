"""mnist-mlp: the MLP of the shared-memory SGD papers, 784-128-128-128-10, on MNIST."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.tasks.base import Task
from paceline.tasks.mlp import MLP
from paceline.tasks.readers import mnist_arrays

__all__ = ["mnist_mlp"]


def mnist_mlp() -> Task:
    """An MLP with 134,794 parameters on MNIST; pixels divided by 255, not standardised."""
    return Task(name="mnist-mlp", model=_model, datasets=_datasets, batch_size=64, learning_rate=0.1, epochs=3)


def _model() -> nn.Module:
    return MLP(784, 128, 128, 128, 10)


def _datasets(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    arrays = mnist_arrays(data)
    train, test = (
        TensorDataset(
            torch.tensor(arrays[f"{part}_images"]).reshape(-1, 784) / 255,
            torch.tensor(arrays[f"{part}_labels"], dtype=torch.int64),
        )
        for part in ("train", "test")
    )
    return train, test
