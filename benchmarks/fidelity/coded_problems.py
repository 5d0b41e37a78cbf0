"""What runs with coded gradients train: text and images, with a model, a batch and a number of steps of their own."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.tasks.cifar10_cnn import SmallResNet, cifar10_datasets

__all__ = ["FEATURES", "PROBLEMS", "Data", "Problem", "features"]

HIDDEN, FEATURES, CLASSES = 32, 1024, 4


class Data(NamedTuple):
    """Samples (N, ...) and classes (N,), to train on and to test on."""

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is trained, and how long.

    Args:
        name: of the data.
        samples: what they are called.
        network: the model in words.
        model: makes it; called after seeding.
        load: reads the data from the folder of data sets.
        file: in this folder, without which there are no data.
        batch: samples of a worker's gradient.
        steps: of a run.
        loss_of_each: the training loss is that of every so-many-th sample, as images take long.
        rates: learning rates to choose from; neighbours differ by a factor of 2.
    """

    name: str
    samples: str
    network: str
    model: Callable[[], nn.Module]
    load: Callable[[Path], Data]
    file: str
    batch: int
    steps: int
    loss_of_each: int
    rates: tuple[float, ...]

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return sum(parameter.numel() for parameter in self.model().parameters())


def features(files: Sequence[Path]) -> list[torch.Tensor]:
    """Of each file, articles (N, FEATURES) and classes (N,): hashed words, rare ones more, of length 1.

    What is rare follows from the first file.
    """
    found: list[torch.Tensor] = []
    rarity: torch.Tensor | None = None
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            articles = list(csv.DictReader(lines))
        x = torch.zeros(len(articles), FEATURES)
        for row, article in zip(x, articles, strict=True):
            row[sorted({zlib.crc32(word.encode()) % FEATURES for word in article["content"].lower().split()})] = 1.0
        if rarity is None:
            rarity = torch.log((1 + len(x)) / (1 + x.sum(0)))
        x = x * rarity
        labels = torch.tensor([int(article["label"]) for article in articles])
        found += [x / x.norm(dim=1, keepdim=True).clamp(min=1e-6), labels - labels.min()]
    return found


def _news(folder: Path) -> Data:
    return Data(*features([folder / "ag_news" / f"{part}.csv.gz" for part in ("train", "test")]))


def _images(folder: Path) -> Data:
    def tensors(dataset: TensorDataset) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = dataset.tensors
        return x, y

    train, test = cifar10_datasets(folder)
    return Data(*tensors(train), *tensors(test))


PROBLEMS = (
    Problem(
        name="AG News",
        samples="articles",
        network=f"words hashed to {FEATURES:,} features, rare ones weighing more, a network of {HIDDEN} hidden units",
        model=lambda: nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)),
        load=_news,
        file="ag_news/train.csv.gz",
        batch=16,
        steps=300,
        loss_of_each=1,
        rates=(1.0, 2.0, 4.0, 8.0),
    ),
    Problem(
        name="CIFAR-10",
        samples="images",
        network="the small convolutional network of the task `cifar10-cnn`, images as they are",
        model=SmallResNet,
        load=_images,
        file="cifar10/cifar10_12k.npz",
        batch=16,
        steps=250,
        loss_of_each=5,
        rates=(0.05, 0.1, 0.2, 0.4),
    ),
)
