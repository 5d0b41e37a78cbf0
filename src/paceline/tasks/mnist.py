"""mnist-mlp and mnist-cnn: the two networks of the shared-memory SGD papers, on MNIST; pixels divided by 255."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.tasks.base import Datasets, Task
from paceline.tasks.mlp import MLP
from paceline.tasks.readers import image_datasets, mnist_arrays


def mnist_mlp() -> Task:
    """An MLP 784-128-128-128-10 with 134,794 parameters on MNIST; pixels divided by 255, not standardised."""
    return _task("mnist-mlp", partial(MLP, 784, 128, 128, 128, 10), _rows)


def mnist_cnn() -> Task:
    """Two convolutions and two linear layers, 27,354 parameters, on MNIST; pixels divided by 255, not standardised."""
    return _task("mnist-cnn", MnistCNN, _images)


def _task(name: str, model: Callable[[], nn.Module], datasets: Callable[[Path | None], Datasets]) -> Task:
    return Task(name=name, model=model, datasets=datasets, batch_size=64, learning_rate=0.1, epochs=3)


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


def _datasets(data: Path | None, shape: tuple[int, ...]) -> Datasets:
    return image_datasets(mnist_arrays(data), lambda images: images.reshape(-1, *shape) / 255)


_rows, _images = partial(_datasets, shape=(784,)), partial(_datasets, shape=(1, 28, 28))  # `keep_data` knows them again
