"""The parameters of a divided model that servers hold: each part has its own vector and its own servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.memory.seats import Seats
from paceline.memory.segment import Layout, NamedLayout, Segment
from paceline.memory.served import ServedPlan, ServedVector
from paceline.optim.sharding import Sharding


@dataclass(frozen=True)
class ServedPartsPlan:
    """Where the parts' vectors lie."""

    parts: tuple[ServedPlan, ...]
    sharding: Sharding
    seats: Seats


class ServedParts:
    """One `ServedVector` (P,) for each part of a model; the interface to the outside is the whole model (W,).

    Parameters that several parts hold are those of the first of these parts.
    """

    waited_s = 0.0

    def __init__(self, segment: Segment, plan: ServedPartsPlan, participant_id: int, *who: int) -> None:
        """Methods that do not name the whole model concern the participant's part; `who` as of `SegmentPart`."""
        self._sharding, self._seats = plan.sharding, plan.seats
        part, member = plan.seats.of(participant_id)
        observer = plan.seats.workers + plan.seats.servers
        self._parts = [
            ServedVector(segment, one, member if number == part else observer, *who)
            for number, one in enumerate(plan.parts)
        ]
        self._own = self._parts[part]
        # Its part's first element in a checkpoint, which has the parts' vectors in a row.
        self.begin = sum(plan.sharding.sizes[:part])

    @staticmethod
    def reserve(layout: Layout, *_: int, sharding: Sharding, seats: Seats, **of_each: Any) -> ServedPartsPlan:
        """Reserves a `ServedVector` (P,) for each part, with the members of its group."""
        layouts = [NamedLayout(layout, f"part {part}.") for part in range(sharding.parts)]
        members, sizes = seats.workers + seats.servers + 1, sharding.sizes
        parts = (ServedVector.reserve(one, size, members, **of_each) for one, size in zip(layouts, sizes, strict=True))
        return ServedPartsPlan(tuple(parts), sharding, seats)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        for number, part in enumerate(self._parts):
            own = torch.empty(self._sharding.sizes[number], dtype=x.dtype)
            self._sharding.cut(x, number, own)
            part.initialise(own, version)

    def copies(self) -> tuple[torch.Tensor, int]:
        """A copy of the vectors of all parts, in a row, and the version of the first."""
        sizes = self._sharding.sizes
        out = torch.empty(sum(sizes), dtype=self._own.x.dtype)
        versions = [part.snapshot(row) for part, row in zip(self._parts, out.split(sizes), strict=True)]
        return out, versions[0]

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the model into `out` (W,); each shard of each part is consistent with one version."""
        locals_, version = self.copies()
        self._sharding.assemble(locals_.split(self._sharding.sizes), out)
        return version

    def copy_of(self, _: int, out: torch.Tensor) -> int:
        """Copies this participant's part into `out` (P,)."""
        return self._own.snapshot(out)

    def counts(self) -> list[dict[str, int]]:
        return [one for part in self._parts for one in part.counts()]

    def recover(self, participant_id: int, incarnation: int) -> bool:
        part, member = self._seats.of(participant_id)
        return self._parts[part].recover(member, incarnation)
