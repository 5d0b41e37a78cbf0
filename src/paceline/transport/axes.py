"""Collectives of some of the workers that another launcher started: along the axes of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.ports.ports import Handle
from paceline.transport.collectives import DistributedCollectives
from paceline.vectors.half_types import add_up
from paceline.vectors.sharding import AxisShape

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
    axes: Mapping[str, AxisShape],
    worker_id: int,
    num_workers: int,
    timeout_s: float,
    make: Callable[[Any, int], AxisCollectives],
) -> dict[str, AxisCollectives]:
    """This worker's collectives along each axis, without those along which it is alone; all call it alike.

    Args:
        axes: which workers are along each.
        worker_id: this worker.
        num_workers: N.
        timeout_s: of the process groups.
        make: collectives of a process group of so many workers.
    """
    found: dict[str, AxisCollectives] = {}
    for name, shape in axes.items():
        for ranks in shape.lists(num_workers) if shape.size > 1 else ():
            group = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_s))
            if worker_id in ranks:
                found[name] = make(group, shape.size)
    return found
