"""Collectives along the axes of a layout, for workers that another launcher started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.optim.sharding import AxisShape
from paceline.ports.ports import Handle
from paceline.transport.collectives import DistributedCollectives


class AxisCollectives(DistributedCollectives):
    """`DistributedCollectives` along one axis; implements `RootedCollectives`.

    Errors name a lost worker by its id in the run; a worker that gives up tells the whole run.

    Args:
        group: of the workers along the axis.
        ranks: their ids in the run, in the order of the axis.
        named: as in `DistributedCollectives`, about the whole run.
    """

    remedy = "Start all workers again from the last checkpoint."

    def __init__(
        self, group: Any, ranks: Sequence[int], store: Any, worker_id: int, num_workers: int, **named: Any
    ) -> None:
        super().__init__(group, store, worker_id, num_workers, **named)
        self._size, self._place = len(ranks), ranks.index(worker_id)
        self.members = range(self._size)

    def start_broadcast(self, vector: torch.Tensor, root: int) -> Handle:
        self._count("broadcast", vector, root)
        return self._start(
            "broadcast", vector, lambda: dist.broadcast(vector, group=self._group, group_src=root, async_op=True)
        )

    def start_reduce(self, vector: torch.Tensor, root: int) -> Handle:
        self._count("reduce", vector, root)
        return self._start(
            "reduce", vector, lambda: dist.reduce(vector, group=self._group, group_dst=root, async_op=True)
        )

    def _misses_somebody(self, number: int) -> bool:
        return False  # the other workers' counts are of operations in the whole run


def make_axes(
    axes: Mapping[str, AxisShape],
    worker_id: int,
    num_workers: int,
    timeout_s: float,
    make: Callable[[Any, Sequence[int]], AxisCollectives],
    backend: str | None = "gloo",
) -> dict[str, AxisCollectives]:
    """This worker's collectives along each axis with several workers; all workers must make the same calls.

    `backend` None: the default group's.
    """
    found: dict[str, AxisCollectives] = {}
    for name, shape in axes.items():
        for ranks in shape.lists(num_workers) if shape.size > 1 else ():
            group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=timeout_s))
            if worker_id in ranks:
                found[name] = make(group, ranks)
    return found
