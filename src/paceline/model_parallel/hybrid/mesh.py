"""N workers as G groups of m: which workers share a model or hold the same shards, and their exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.model_parallel.counted import Traffic
from paceline.ports.ports import Collectives, Handle

__all__ = ["Axis", "Mesh"]

_MOST_ELEMENTS = 1 << 22  # of one operation inside a group, if its carrier has no limit


class Axis:
    """Exchanges of whole tensors among the workers of one group.

    Args:
        collectives: of these workers.
        index: this worker's position among them.
        size: number of these workers.
        most_elements: of one operation of the carrier; longer ones are split.
    """

    def __init__(
        self, collectives: Collectives | None, index: int, size: int, most_elements: int = _MOST_ELEMENTS
    ) -> None:
        self._collectives = collectives
        self.index, self.size = index, size
        self._most = most_elements

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return part.unsqueeze(0)
        flat = part.contiguous().view(-1)
        out = flat.new_empty(self.size, len(flat))
        assert self._collectives is not None
        for columns in self._columns(len(flat)):
            piece = flat[columns]
            taken = piece.new_empty(self.size * len(piece))
            self._collectives.start_all_gather(piece, taken).wait()
            out[:, columns] = taken.view(self.size, -1)
        return out.view(self.size, *part.shape)

    def reduce_scatter(self, pieces: torch.Tensor) -> torch.Tensor:
        """This worker's piece of `pieces` (size, ...), summed over all workers."""
        if self.size == 1:
            return pieces[0]
        collectives = self._collectives
        assert collectives is not None
        return self._exchange(pieces, lambda given, taken: collectives.start_reduce_scatter(given, taken), 1)[0]

    def all_to_all(self, pieces: torch.Tensor) -> torch.Tensor:
        """Piece k of `pieces` (size, ...) goes to worker k; returns the pieces for this worker, in worker order."""
        if self.size == 1:
            return pieces
        collectives = self._collectives
        assert collectives is not None
        return self._exchange(pieces, lambda given, taken: collectives.start_all_to_all(given, taken), self.size)

    def _exchange(
        self, pieces: torch.Tensor, start: Callable[[torch.Tensor, torch.Tensor], Handle], rows: int
    ) -> torch.Tensor:
        flat = pieces.contiguous().view(self.size, -1)
        out = flat.new_empty(rows, flat.shape[1])
        for columns in self._columns(flat.shape[1]):
            given = flat[:, columns].contiguous().view(-1)
            taken = given.new_empty(rows * (columns.stop - columns.start))
            start(given, taken).wait()
            out[:, columns] = taken.view(rows, -1)
        return out.view(rows, *pieces.shape[1:])

    def _columns(self, length: int) -> list[slice]:
        """Ranges of a piece's elements, short enough that an operation on those of all workers is within the limit."""
        step = max(1, self._most // self.size)
        return [slice(first, min(first + step, length)) for first in range(0, length, step)]


@dataclass(frozen=True)
class Mesh:
    """This worker's position: workers g m to g m + m - 1 are group g; workers with the same index in their group are replicas.

    Args:
        worker_id: this worker.
        num_workers: N.
        groups: G, which divides N.
        everybody: collectives of all workers.
        group: those of its group.
        replicas: collectives of the workers with the same shards; None: there is one group.
        traffic: counts exchanges.
    """

    worker_id: int
    num_workers: int
    groups: int
    everybody: Collectives | None
    group: Axis
    replicas: Collectives | None
    traffic: Traffic = field(default_factory=Traffic)

    @staticmethod
    def alone() -> Mesh:
        """The mesh of a run with one worker."""
        return Mesh(0, 1, 1, None, Axis(None, 0, 1), None)

    @property
    def parts(self) -> int:
        """m: workers in a group."""
        return self.num_workers // self.groups

    @property
    def first_of_group(self) -> int:
        """The group's first worker."""
        return self.worker_id // self.parts * self.parts

    def count_rows(self, rows: int) -> list[int]:
        """The number of rows in each worker's batch, in worker order."""
        if self.everybody is None:
            return [rows]
        own, all_ = torch.tensor([float(rows)], dtype=torch.float64), torch.empty(self.num_workers, dtype=torch.float64)
        self.everybody.start_all_gather(own, all_).wait()
        return [int(one) for one in all_.tolist()]
