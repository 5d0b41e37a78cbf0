"""The parts of a run's memory: their areas are reserved before the segment is made, and then all processes map them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from paceline.memory.atomics import load, store
from paceline.memory.segment import LINE_BYTES, Layout, Segment


@dataclass(frozen=True, kw_only=True)
class PartPlan:
    """Where the areas of a part lie, and for how many participants; the same in every process."""

    num_parameters: int  # P, the length of a vector
    num_participants: int  # of the run: workers, then servers and their copies, then evaluators
    num_evaluators: int = 0  # participants that only read
    dtype: torch.dtype = torch.float32  # of the vectors
    at: Mapping[str, int] = field(default_factory=dict[str, int])  # offset of each area in bytes

    @property
    def num_writers(self) -> int:
        return self.num_participants - self.num_evaluators


Plan = TypeVar("Plan", bound=PartPlan)


class SegmentPart(Generic[Plan]):
    """Base of the kinds of shared parameters, and of the collectives.

    Args:
        segment: shared memory made from the layout of `plan`.
        participant_id: of the object's owner, `0 <= participant_id < num_participants`.
        incarnation: how many times the owner has been restarted.
        abort_address: word that is nonzero when the run is being stopped; 0: there is none, or nothing here waits.
    """

    plan_type: type[Any] = PartPlan

    def __init__(
        self, segment: Segment, plan: Plan, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        self._mapping = segment.mapping  # as long as addresses in it are used
        self._segment = segment
        self._plan = plan
        self._participant, self._incarnation = participant_id, incarnation
        self._abort = abort_address

    @classmethod
    def reserve(
        cls,
        layout: Layout,
        num_parameters: int,
        num_participants: int,
        *,
        num_evaluators: int = 0,
        dtype: torch.dtype = torch.float32,
        **own: Any,
    ) -> Plan:
        """Reserves the areas; see `PartPlan` for the numbers. `own` are further fields of this kind's plan."""
        numbers = {"num_parameters": num_parameters, "num_participants": num_participants}
        plan = cls.plan_type(**numbers, num_evaluators=num_evaluators, dtype=dtype, **own)
        return replace(plan, at=cls.areas(layout, plan))

    @staticmethod
    def areas(layout: Layout, plan: Any) -> dict[str, int]:
        """Reserves this kind's areas; returns their offsets."""
        raise NotImplementedError

    def _word(self, area: str, index: int = 0) -> int:
        return self._segment.address + self._plan.at[area] + index * LINE_BYTES

    def _vector(self, area: str) -> torch.Tensor:
        """A vector (P,); a new tensor object at every call."""
        return self._segment.tensor(self._plan.at[area], self._plan.num_parameters, self._plan.dtype)


class OneVector(SegmentPart[PartPlan]):
    """One vector `x` (P,) for all, and a word that counts its updates."""

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        self.x = self._vector("x")
        self._version = self._word("version")

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Sets the initial vector (P,) and version (a resumed run continues counting), before any worker starts."""
        self.x.copy_(x)
        store(self._version, version)

    @property
    def version(self) -> int:
        return load(self._version)
