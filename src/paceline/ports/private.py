"""A parameter vector that its owner alone writes, on any device or in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

EXCLUDES_NOBODY: AbstractContextManager[None] = nullcontext()


class PrivateVector:
    """A vector `x` (P,) with a version that no other process sees; replaces shared kinds with a single owner.

    Only one thread accesses it, or threads that hold the program's lock. On a GPU they use one stream, so a copy made without
    the lock is consistent, too.

    Args:
        version: updates that were applied to it before.

    Attributes:
        updates: the number of updates applied to it by this object.
    """

    __slots__ = ("updates", "version", "x")

    def __init__(self, x: torch.Tensor, version: int = 0) -> None:
        self.x = x
        self.version, self.updates = version, 0

    def writing(self) -> AbstractContextManager[None]:
        return EXCLUDES_NOBODY

    def advance(self, updates: int = 1) -> int:
        self.version += 1
        self.updates += updates
        return self.version

    def snapshot(self, out: torch.Tensor) -> int:
        out.copy_(self.x)
        return self.version

    def replace(self, x: torch.Tensor) -> None:
        self.x.copy_(x)

    def own(self) -> tuple[int, int, torch.Tensor]:
        return self.version, self.updates, self.x.clone()

    def go_on_with(self, members: Sequence[int]) -> None:
        """No other process reads the vector."""

    def restore(self, version: int, x: torch.Tensor) -> None:
        self.x.copy_(x)
        self.version = version
