"""Collectives of some of the workers that another launcher started: in a group that shares a model, and across groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.ports.ports import Handle
from paceline.transport.collectives import DistributedCollectives
from paceline.vectors.half_types import add_up

__all__ = ["AxisCollectives", "make_axes"]


class AxisCollectives(DistributedCollectives):
    """As `DistributedCollectives`, of one axis. A lost worker is named as in the run; who gives up says so to all of it.

    Args:
        group: of the axis' workers.
        size: how many they are.
        arguments: as of `DistributedCollectives`, of the whole run.
    """

    def __init__(self, group: Any, size: int, *arguments: Any, **named: Any) -> None:
        super().__init__(group, *arguments, **named)
        self._size = size

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> Handle:
        """Begins summing `vector` (n,); `part` (n / size,) becomes this worker's piece of the sum."""
        if vector.device.type != "cpu":
            return super().start_reduce_scatter(vector, part)
        self._count(1, vector)
        pieces = torch.empty_like(vector)
        return self._start(
            "reduce-scatter",
            vector,
            lambda: dist.all_to_all_single(pieces, vector, group=self._group, async_op=True),
            finish=lambda: add_up(pieces.view(self._size, -1).unbind(), part),
        )

    def _count(self, num_passes: int, vector: torch.Tensor) -> None:
        self.counts.messages += num_passes * (self._size - 1)
        self.counts.sent_bytes += num_passes * (self._size - 1) * vector.nbytes // self._size

    def _misses_somebody(self, number: int) -> bool:
        return False  # what others say of their operations counts those of the whole run


def make_axes(
    groups: int,
    worker_id: int,
    num_workers: int,
    timeout_s: float,
    make: Callable[[Any, int], AxisCollectives],
) -> tuple[AxisCollectives | None, AxisCollectives | None]:
    """(within this worker's group, across the workers with its place in theirs); all call it alike. None: it is alone there.

    Args:
        groups: G, which divides the number of workers.
        worker_id: this worker.
        num_workers: N.
        timeout_s: of the process groups.
        make: collectives of a process group of so many workers.
    """
    parts = num_workers // groups
    within = [list(range(first, first + parts)) for first in range(0, num_workers, parts)]
    across = [list(range(place, num_workers, parts)) for place in range(parts)]
    found: list[AxisCollectives | None] = []
    for lists in (within, across):
        own = None
        for ranks in lists if len(lists[0]) > 1 else ():
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
            if worker_id in ranks:
                own = make(group, len(ranks))
        found.append(own)
    return found[0], found[1]
