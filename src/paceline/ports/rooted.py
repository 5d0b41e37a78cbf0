"""Collectives with a root worker, the source or the only receiver of the result: along the axes of a layout."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.ports.ports import Collectives, Counts, Handle


class RootedCollectives(Collectives, Protocol):
    """`Collectives` with a root, given as a worker's place among the participants."""

    def start_broadcast(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing `vector` (n,) by that of `root`."""
        ...

    def start_reduce(self, vector: torch.Tensor, root: int) -> Handle:
        """Begins replacing the root's `vector` (n,) by the sum over all workers; the others' become undefined."""
        ...


def count_operation(counts: Counts, kind: str, vector: torch.Tensor, place: int, size: int, root: int = 0) -> None:
    """Counts what a worker sends as for ring algorithms: in each pass around the ring all pieces of the vector but one.

    Args:
        counts: messages and bytes are added here.
        kind: as of `Operation`.
        vector: (n,).
        place: this worker's position among the participants.
        size: their number.
        root: of a broadcast or reduce, which travel along the ring as along a chain.
    """
    if kind in ("broadcast", "reduce"):
        messages = int(passes_on(kind, place, root, size))
        counts.sent_bytes += messages * vector.nbytes
    else:
        messages = (size - 1) * (2 if kind == "all-reduce" else 1)
        counts.sent_bytes += messages * vector.nbytes // size
    counts.messages += messages


def passes_on(kind: str, place: int, root: int, size: int) -> bool:
    """Whether a worker counts as sending the vector once, as if it travelled along a chain of workers.

    A broadcast begins at the root and ends at the worker before it, which sends nothing; a sum ends at the root.

    >>> [[passes_on(kind, place, root=1, size=3) for place in range(3)] for kind in ("broadcast", "reduce")]
    [[False, True, True], [True, False, True]]
    """
    return place != (root if kind == "reduce" else (root - 1) % size)
