"""mnist-cnn: the convolutional network of the shared-memory SGD papers, on MNIST."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.tasks.base import Task
from paceline.tasks.readers import mnist_arrays

__all__ = ["mnist_cnn"]


def mnist_cnn() -> Task:
    """Two convolutions and two linear layers, 27,354 parameters, on MNIST; pixels divided by 255, not standardised."""
    return Task(name="mnist-cnn", model=MnistCNN, datasets=_datasets, batch_size=64, learning_rate=0.1, epochs=3)


class MnistCNN(nn.Module):
    """Convolution 1 to 4 channels, max-pool, convolution 4 to 8, max-pool, linear 200-128-10; kernels 3x3, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.linear1, self.linear2 = nn.Linear(200, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (samples, 10) of images (samples, 1, 28, 28)."""
        x = F.max_pool2d(F.relu(F.conv2d(x, self.conv1.weight, self.conv1.bias)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, self.conv2.weight, self.conv2.bias)), 2)
        x = F.relu(F.linear(x.flatten(1), self.linear1.weight, self.linear1.bias))
        return F.linear(x, self.linear2.weight, self.linear2.bias)


def _datasets(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    arrays = mnist_arrays(data)
    train, test = (
        TensorDataset(
            torch.tensor(arrays[f"{part}_images"]).reshape(-1, 1, 28, 28) / 255,
            torch.tensor(arrays[f"{part}_labels"], dtype=torch.int64),
        )
        for part in ("train", "test")
    )
    return train, test
