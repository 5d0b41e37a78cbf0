"""vgg-small: convolutions, and fully connected layers that hold most of the weights, on 12,000 CIFAR-10 images."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from paceline.tasks.base import Task
from paceline.tasks.cifar10_cnn import cifar10_datasets


def vgg_small() -> Task:
    """A small VGG on CIFAR-10 with 682,282 parameters; 655,360 of them are weights of its first two linear layers.

    It is what layouts are tried on: `--layout "hybrid(groups=2)"` cuts these two.
    """
    return Task(
        name="vgg-small", model=SmallVGG, datasets=cifar10_datasets, batch_size=32, learning_rate=0.05, epochs=10
    )


class SmallVGG(nn.Module):
    """Three 3x3 convolutions with 16, 32 and 64 channels, each halved by max-pooling; linear 1024-512-256-10 with dropout."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 16, 32, 64)
        blocks = [
            (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for before, after in pairwise(channels)
        ]
        self.features = nn.Sequential(*(one for block in blocks for one in block))
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 512),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (samples, 10) of images (samples, 3, 32, 32)."""
        return self.classifier(self.features(x).flatten(1))
