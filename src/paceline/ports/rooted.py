"""Collectives with a root worker, the source or the only receiver of the result: along the axes of a layout."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from paceline.ports.ports import Collectives, Handle

__all__ = ["RootedCollectives", "passes_on"]


class RootedCollectives(Collectives, Protocol):
    """`Collectives` with a root, given as a worker's place among the participants."""

    def start_broadcast(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing `vector` (n,) by that of `root`."""
        ...

    def start_reduce(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing the root's `vector` (n,) by the sum over all workers; the others' become undefined."""
        ...


def passes_on(kind: Literal["broadcast", "reduce"], place: int, root: int, size: int) -> bool:
    """Whether a worker counts as sending the vector once, as if it travelled along a chain of workers.

    A broadcast begins at the root and ends at the worker before it, which sends nothing; a sum ends at the root.

    >>> [[passes_on(kind, place, root=1, size=3) for place in range(3)] for kind in ("broadcast", "reduce")]
    [[False, True, True], [True, False, True]]
    """
    return place != (root if kind == "reduce" else (root - 1) % size)
