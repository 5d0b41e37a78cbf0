"""A parameter vector that all workers read and write at the same time (the memory of Hogwild!)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.memory.atomics import compare_and_swap, fetch_add, store
from paceline.memory.failpoints import fail_point
from paceline.memory.ownership import owner_token
from paceline.memory.segment import Layout
from paceline.memory.segment_part import OneVector, PartPlan


class RacingVector(OneVector):
    """One live vector without any exclusion; implements `RacingParameters`.

    Use when updates are sparse or small, so that conflicts are rare. A reader may see half of an update, and when two
    workers write one component at the same time, one write can be lost. Only the version is exact.
    Costs: `writing()` 0.5 us, `advance` 0.2 us; one copy of the parameters in all.

    Reference: Niu, Recht, Ré and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
        2011, arXiv:1106.5730. There a component is added atomically; a vector operation on `x` is not.
    """

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        token = owner_token(self._participant, self._incarnation)
        self._writing = _Writing(self._word("writing", self._participant), token)

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        return {
            "x": layout.vector("racing.x", plan.num_parameters, plan.dtype),
            "version": layout.words("racing.version", 1),
            "writing": layout.words("racing.writing", plan.num_participants),  # of each: its token while it writes
        }

    def writing(self) -> AbstractContextManager[None]:
        """Marks this worker as being in the middle of a write; does not exclude others."""
        return self._writing

    def advance(self) -> int:
        return fetch_add(self._version, 1) + 1

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the live vector; returns the version before the copy, which may hold parts of later updates."""
        version = self.version
        out.copy_(self.x)
        return version

    def replace(self, x: torch.Tensor) -> None:
        self.x.copy_(x)

    def recover(self, participant_id: int, incarnation: int) -> bool:
        return compare_and_swap(self._word("writing", participant_id), owner_token(participant_id, incarnation), 0)


@dataclass(slots=True)
class _Writing:
    """A word that holds a worker's token while it writes, so that a kill in the middle is detected (context manager)."""

    _word: int
    _token: int

    def __enter__(self) -> None:
        store(self._word, self._token)
        fail_point("racing.mid_write")

    def __exit__(self, *exception: object) -> None:
        store(self._word, 0)
