"""A worker's vector on a GPU, which other processes read from shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.memory.replicated import ReplicatedVector


class MirroredVector:
    """A vector `x` (P,) on any device; after every write, the worker's `ReplicatedVector` has the same values.

    Costs: a copy to the host per update, for which the worker waits, as it does for the gradient before the update.
    """

    def __init__(self, host: ReplicatedVector, x: torch.Tensor) -> None:
        self._host = host  # the vector in shared memory, initialised
        self.x = x
        self.x.copy_(host.x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.x[:1].cpu()  # waits for what the device computes, so that readers wait only for the update and its copy
        with self._host.writing():
            yield
            self._host.x.copy_(self.x)

    def snapshot(self, out: torch.Tensor) -> int:
        """As of `ReplicatedVector`, with what the loop has changed since the last update."""
        with self.writing():
            pass
        return self._host.snapshot(out)

    def enter(self, giver: int) -> None:
        self._host.enter(giver)
        self.x.copy_(self._host.x)

    def restore(self, version: int, x: torch.Tensor) -> None:
        self._host.restore(version, x)
        self.x.copy_(x)

    def replace(self, x: torch.Tensor) -> None:
        self._host.replace(x)
        self.x.copy_(x)
