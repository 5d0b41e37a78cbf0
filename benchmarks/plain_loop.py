"""The peer: a plain eager PyTorch loop for mnist-mlp, as anyone would write it; one process, one intra-op thread."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


def make_model() -> nn.Sequential:
    """784-128-128-128-10 with ReLU: 134,794 parameters."""
    return nn.Sequential(
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class ShuffledBatches:
    """Batches of tensors in memory, in a new random order each epoch: a fast loader, so that training is what is timed."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int) -> None:
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.targets))
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            yield self.inputs[indices], self.targets[indices]


def plain_steps_per_s(inputs: torch.Tensor, targets: torch.Tensor, batch_size: int, seconds: float) -> float:
    """Steps per second of the plain loop, after a fifth of `seconds` of warm-up."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begun_s = time.perf_counter()
    counted_from: tuple[int, float] | None = None
    steps = 0
    while True:
        for x, y in ShuffledBatches(inputs, targets, batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
            now_s = time.perf_counter()
            if counted_from is None and now_s - begun_s > 0.2 * seconds:
                counted_from = (steps, now_s)
            elif now_s - begun_s > 1.2 * seconds and counted_from is not None:
                return (steps - counted_from[0]) / (now_s - counted_from[1])
