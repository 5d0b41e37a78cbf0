"""Collectives of some of a run's workers, where these are groups that share a model each: in the group, and across groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.segment import LINE_BYTES, Layout, Segment
from paceline.memory.segment_part import PartPlan

__all__ = ["Axes", "AxesPlan", "plan_axes"]


@dataclass(frozen=True)
class AxesPlan:
    """Where the axes' areas lie.

    Args:
        num_workers: N.
        groups: G; group g is the workers from g N / G on.
        within: of each group; empty: groups of one.
        across: of each place in a group; empty: there is one group.
    """

    num_workers: int
    groups: int
    within: tuple[PartPlan, ...]
    across: tuple[PartPlan, ...]

    @property
    def parts(self) -> int:
        """Workers of a group."""
        return self.num_workers // self.groups


def plan_axes(layout: Layout, num_workers: int, groups: int, num_elements: int, dtype: torch.dtype) -> AxesPlan:
    """Reserves the areas: operations on up to `num_elements` (P)."""

    def reserve(axis: str, size: int, number: int) -> tuple[PartPlan, ...]:
        if size == 1:
            return ()
        named = (_Named(layout, f"{axis} {index}.") for index in range(number))
        return tuple(SharedMemoryCollectives.reserve(one, num_elements, size, dtype=dtype) for one in named)

    parts = num_workers // groups
    return AxesPlan(num_workers, groups, reserve("within", parts, groups), reserve("across", groups, parts))


class _Named(Layout):
    """A layout in which the same kind of part has several places."""

    def __init__(self, layout: Layout, prefix: str) -> None:
        super().__init__()
        self._layout, self._prefix = layout, prefix

    def reserve(self, name: str, size_bytes: int, alignment_bytes: int = LINE_BYTES) -> int:
        return self._layout.reserve(self._prefix + name, size_bytes, alignment_bytes)


class Axes:
    """One worker's collectives along both axes, or an onlooker's view of who is lost.

    Args:
        segment: the mapped memory.
        plan: from `plan_axes`.
        worker_id: whose these are.
        abort_address: as of `SharedMemoryCollectives`.

    Attributes:
        within: of this worker's group; None: it is alone in it.
        across: of the workers with the same place in the other groups; None: there is one group.
    """

    def __init__(
        self, segment: Segment, plan: AxesPlan, worker_id: int, abort_address: int = 0, *, timeout_s: float = 600.0
    ) -> None:
        self._segment, self._plan = segment, plan

        def member(
            plans: tuple[PartPlan, ...], number: int, index: int, names: range
        ) -> SharedMemoryCollectives | None:
            if not plans or worker_id >= plan.num_workers:
                return None
            return SharedMemoryCollectives(
                segment, plans[number], index, abort_address=abort_address, timeout_s=timeout_s, names=names
            )

        group, place = divmod(worker_id, plan.parts)
        first = group * plan.parts
        self.within = member(plan.within, group, place, range(first, first + plan.parts))
        self.across = member(plan.across, place, group, range(place, plan.num_workers, plan.parts))

    @property
    def both(self) -> list[SharedMemoryCollectives]:
        """Those that there are."""
        return [one for one in (self.within, self.across) if one is not None]

    def mark_lost(self, worker_id: int) -> None:
        """Says that this worker will not come any more, along both axes."""
        group, place = divmod(worker_id, self._plan.parts)
        for plans, number, index in ((self._plan.within, group, place), (self._plan.across, place, group)):
            if plans:
                SharedMemoryCollectives(self._segment, plans[number], index).mark_lost(index)
