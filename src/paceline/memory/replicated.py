"""One parameter vector per worker, in shared memory only so that others can look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paceline.memory.atomics import fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import LINE_BYTES, Layout, Segment

__all__ = ["ReplicatedVector"]

_SNAPSHOT_DEADLINE_S = 60.0
_BETWEEN_TRIES_S = 50e-6


@dataclass(frozen=True)
class ReplicatedPlan:
    """Where the vectors and their words lie; the same in every process."""

    vectors: tuple[int, ...]  # offset of each worker's vector
    words: int  # offset of the workers' words: (version, writing) each on a line of its own
    num_parameters: int
    dtype: torch.dtype


class ReplicatedVector:
    """A worker's own vector `x` (P,), with a version and a mark while it is being written.

    The pair of words is a sequence lock: `snapshot` copies worker 0's vector and tries again if it was written meanwhile.

    Args:
        segment: shared memory made from the layout of `plan`.
        plan: from `reserve`.
        participant_id: a worker's id; an evaluator may pass any other and only take snapshots.
        incarnation: unused here, as nothing is held that others wait for.
        abort_address: unused here, as nothing waits.
    """

    def __init__(
        self, segment: Segment, plan: ReplicatedPlan, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        self._segment = segment
        self._plan = plan
        owner = participant_id if participant_id < len(plan.vectors) else 0
        self.x = segment.tensor(plan.vectors[owner], (plan.num_parameters,), plan.dtype)
        self._version = self._word(owner)
        self._writing = self._version + 8
        self.waited_s = 0.0

    @staticmethod
    def reserve(
        layout: Layout,
        num_parameters: int,
        num_participants: int,
        *,
        num_evaluators: int = 0,
        dtype: torch.dtype = torch.float32,
        name: str = "replicated",
    ) -> ReplicatedPlan:
        """Reserves one vector for each worker; evaluators, the last participants, have none."""
        num_workers = num_participants - num_evaluators
        vectors = tuple(layout.vector(f"{name}.x{worker}", num_parameters, dtype) for worker in range(num_workers))
        return ReplicatedPlan(vectors, layout.words(f"{name}.words", num_workers), num_parameters, dtype)

    def _word(self, worker_id: int) -> int:
        return self._segment.address + self._plan.words + LINE_BYTES * worker_id

    @property
    def version(self) -> int:
        """Updates applied to this worker's vector."""
        return load(self._version)

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Gives every worker's vector the values of `x` (P,)."""
        for worker, offset in enumerate(self._plan.vectors):
            self._segment.tensor(offset, (self._plan.num_parameters,), self._plan.dtype).copy_(x)
            store(self._word(worker), version)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Marks the vector as being written."""
        store(self._writing, 1)
        try:
            fail_point("replicated.mid_write")
            yield
        finally:
            store(self._writing, 0)

    def advance(self) -> int:
        """Counts one update."""
        return fetch_add(self._version, 1) + 1

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies a vector that nobody was writing into `out` (P,); returns its version."""
        until_s = time.monotonic() + _SNAPSHOT_DEADLINE_S
        while True:
            before = load(self._version)
            if load(self._writing) == 0:
                out.copy_(self.x)
                if load(self._writing) == 0 and load(self._version) == before:
                    return before
            if time.monotonic() > until_s:
                raise RuntimeError(f"worker 0 was writing its vector at every look for {_SNAPSHOT_DEADLINE_S:.0f} s")
            # Its owner may have lost its core (or, with threads, the interpreter) in the middle of a write.
            time.sleep(_BETWEEN_TRIES_S)

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Ends the mark of a dead worker; returns whether it died while writing."""
        address = self._word(participant_id) + 8
        torn = load(address) != 0
        store(address, 0)
        return torn
