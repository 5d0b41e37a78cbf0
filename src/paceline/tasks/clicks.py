"""clicks: a recommender with tables of a million rows, on generated data; needs no download."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.tasks.base import Task

USERS, ITEMS = 700_000, 300_000
_WIDTH = 16
_TRAINING, _TEST = 200_000, 20_000


def clicks() -> Task:
    """Predicts whether a user clicks on an item: 220,000 pairs of 700,000 users and 300,000 items, sparse gradients."""
    return Task(
        name="clicks",
        model=Recommender,
        datasets=_datasets,
        loss=F.binary_cross_entropy_with_logits,
        accuracy=_accuracy,
        batch_size=128,
        learning_rate=3.0,
        epochs=2,
    )


class Recommender(nn.Module):
    """A vector (16,) and a bias per user and per item; the score is the vectors' product, and the biases'."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, _WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, _WIDTH, sparse=True)
        self.bias = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for table in (self.users, self.items):
                table.weight.mul_(0.3)
                table.weight[:, 0] = 0.0  # the bias

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits (samples,) of pairs (samples, 2) of a user and an item."""
        users, items = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return (users[:, 1:] * items[:, 1:]).sum(1) + users[:, 0] + items[:, 0] + self.bias


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    return ((output > 0) == (target > 0.5)).float().mean()


def _datasets(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Users and items by Zipf's law: the r-th is drawn with a probability in proportion to 1 / r."""
    del data
    draw = torch.Generator().manual_seed(0)
    size = _TRAINING + _TEST
    pairs = torch.stack([_zipf(USERS, size, draw), _zipf(ITEMS, size, draw)], 1)
    # How much users click at all, how much items are clicked on, and a taste in two dimensions, all unknown to the model.
    scores = torch.zeros(size)
    for column, rows in enumerate((USERS, ITEMS)):
        scores += torch.randn(rows, generator=draw)[pairs[:, column]]
    tastes = [torch.randn(rows, 2, generator=draw)[pairs[:, column]] for column, rows in enumerate((USERS, ITEMS))]
    scores += (tastes[0] * tastes[1]).sum(1)
    targets = (torch.rand(size, generator=draw) < scores.sigmoid()).float()
    return TensorDataset(pairs[:_TRAINING], targets[:_TRAINING]), TensorDataset(pairs[_TRAINING:], targets[_TRAINING:])


def _zipf(most: int, size: int, draw: torch.Generator) -> Tensor:
    ranks = float(most) ** torch.rand(size, generator=draw, dtype=torch.float64)
    return ranks.long().clamp_(1, most) - 1
