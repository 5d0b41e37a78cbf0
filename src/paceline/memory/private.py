"""A worker's own parameter vector, on whatever device it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["PrivateVector"]

_UNMARKED = nullcontext()


class PrivateVector:
    """A vector `x` (P,) that no other process sees, with a version; stands in for shared kinds of a single owner.

    All access to it is by one thread, or by threads that hold the program's lock; on a GPU they give their work to one stream,
    so that a copy made without the lock is of one instant, too.

    Args:
        x: the vector, kept.
        version: updates that were applied to it before.

    Attributes:
        updates: of the changes that it has had here, those that were updates.
    """

    def __init__(self, x: torch.Tensor, version: int = 0) -> None:
        self.x = x
        self.version, self.updates = version, 0
        self.waited_s = 0.0

    def writing(self) -> AbstractContextManager[None]:
        return _UNMARKED

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

    def restore(self, version: int, x: torch.Tensor) -> None:
        self.x.copy_(x)
        self.version = version
