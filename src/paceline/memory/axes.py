"""Collectives along each axis of a layout: among workers that share a model, and among its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import Layout, NamedLayout, Segment
from paceline.memory.segment_part import PartPlan
from paceline.optim.sharding import EXCHANGED_ELEMENTS, REPLICAS, AxisShape


@dataclass(frozen=True)
class AxesPlan:
    """Where the axes' areas lie."""

    num_workers: int  # N
    # By name: the workers along the axis, and the areas of each of their groups. Axes of one worker have none.
    axes: Mapping[str, tuple[AxisShape, tuple[PartPlan, ...]]]


def plan_axes(
    layout: Layout, num_workers: int, axes: Mapping[str, AxisShape], num_elements: int, dtype: torch.dtype
) -> AxesPlan:
    """Reserves the areas for operations on up to `num_elements` (P), or more along the axes of activations."""
    plans: dict[str, tuple[AxisShape, tuple[PartPlan, ...]]] = {}
    for name, shape in axes.items():
        if shape.size == 1:
            continue
        length = num_elements if name == REPLICAS else max(num_elements, EXCHANGED_ELEMENTS)
        named = (NamedLayout(layout, f"{name} {number}.") for number in range(num_workers // shape.size))
        reserved = (SharedMemoryCollectives.reserve(one, length, shape.size, dtype=dtype) for one in named)
        plans[name] = shape, tuple(reserved)
    return AxesPlan(num_workers, plans)


class Axes:
    """One worker's collectives along all axes, or an observer's view of lost workers."""

    def __init__(
        self, segment: Segment, plan: AxesPlan, worker_id: int, abort_address: int = 0, *, timeout_s: float = 600.0
    ) -> None:
        self._segment, self._plan = segment, plan
        self.along: dict[str, SharedMemoryCollectives] = {}  # by axis, without axes on which the worker is alone
        if worker_id < plan.num_workers:
            for name in plan.axes:
                self.along[name] = self._of(name, worker_id, abort_address, timeout_s)

    def _of(self, name: str, worker_id: int, abort_address: int = 0, timeout_s: float = 0.0) -> SharedMemoryCollectives:
        shape, plans = self._plan.axes[name]
        members = shape.members(worker_id)
        plan = plans[shape.lists(self._plan.num_workers).index(members)]
        own = {"abort_address": abort_address, "timeout_s": timeout_s}
        return SharedMemoryCollectives(self._segment, plan, shape.place(worker_id), names=members, **own)

    def mark_lost(self, worker_id: int) -> None:
        for name, (shape, _) in self._plan.axes.items():
            self._of(name, worker_id).mark_lost(shape.place(worker_id))
