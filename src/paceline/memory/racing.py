"""A parameter vector that everyone reads and writes at the same time (the memory of Hogwild!)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.ownership import owner_token
from paceline.memory.segment import LINE_BYTES, Layout, Segment

__all__ = ["RacingPlan", "RacingVector"]


@dataclass(frozen=True, kw_only=True)
class RacingPlan:
    """Where a racing vector lies in its segment (offsets in bytes)."""

    num_parameters: int
    num_participants: int
    dtype: torch.dtype
    x: int
    version: int
    writing: int  # one word per participant: its token while it writes


class RacingVector:
    """One live vector without any exclusion; implements `RacingParameters`.

    Use when updates are sparse or small, so that conflicts are rare. A reader may see half of an update, and of two
    writes to one component at the same time one can be lost. Only the version is exact.
    Costs: `writing()` 0.5 us, `advance` 0.2 us; one copy of the parameters in all.

    Args:
        segment: the shared memory.
        plan: from `reserve`.
        participant_id: who uses this object, `0 <= participant_id < num_participants`.
        incarnation: which of its lives.
        abort_address: accepted by all kinds alike; nothing here ever waits.

    Reference: Niu, Recht, Ré and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
        2011, arXiv:1106.5730. There a component is added atomically; a vector operation on `x` is not.
    """

    def __init__(
        self, segment: Segment, plan: RacingPlan, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        self._mapping = segment.mapping
        self.x = segment.tensor(plan.x, plan.num_parameters, plan.dtype)
        self._version = segment.address + plan.version
        self._all_writing = segment.address + plan.writing
        word = self._all_writing + participant_id * LINE_BYTES
        self._writing = _Writing(word, owner_token(participant_id, incarnation), "racing.mid_write")

    @staticmethod
    def reserve(
        layout: Layout,
        num_parameters: int,
        num_participants: int,
        *,
        num_evaluators: int = 0,
        dtype: torch.dtype = torch.float32,
        name: str = "racing",
    ) -> RacingPlan:
        """Reserves the vector and its words (evaluators are among the participants and cost nothing here)."""
        return RacingPlan(
            num_parameters=num_parameters,
            num_participants=num_participants,
            dtype=dtype,
            x=layout.vector(f"{name}.x", num_parameters, dtype),
            version=layout.words(f"{name}.version", 1),
            writing=layout.words(f"{name}.writing", num_participants),
        )

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Sets the vector (P,) and the version to begin with (a resumed run goes on counting), before anyone starts."""
        self.x.copy_(x)
        store(self._version, version)

    @property
    def version(self) -> int:
        """Number of updates counted so far."""
        return load(self._version)

    def writing(self) -> AbstractContextManager[None]:
        """Marks this worker as being in the middle of a write; excludes nobody."""
        return self._writing

    def advance(self) -> int:
        """Counts one update atomically; returns the version that it made."""
        return fetch_add(self._version, 1) + 1

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the live vector; returns the version before the copy, which may hold parts of later updates."""
        version = self.version
        out.copy_(self.x)
        return version

    def replace(self, x: torch.Tensor) -> None:
        """Gives the vector the values of `x` (P,), once nobody writes any more; counts no update."""
        self.x.copy_(x)

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Forgets that a dead worker was writing; returns whether it was (its last update may be torn)."""
        word = self._all_writing + participant_id * LINE_BYTES
        return compare_and_swap(word, owner_token(participant_id, incarnation), 0)


class _Writing:
    """A word that holds a worker's token while it writes, so that a kill in the middle is known (context manager)."""

    __slots__ = ("_fail_point", "_token", "_word")

    def __init__(self, word: int, token: int, name: str) -> None:
        self._word = word
        self._token = token
        self._fail_point = name

    def __enter__(self) -> None:
        store(self._word, self._token)
        fail_point(self._fail_point)

    def __exit__(self, *exception: object) -> None:
        store(self._word, 0)
