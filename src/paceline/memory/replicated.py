"""One parameter vector per worker, in shared memory only so that others can look."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.memory.atomics import fetch_add, kernel, load, store
from paceline.memory.segment import LINE_BYTES, Layout, Segment
from paceline.memory.sequence import SequenceLock
from paceline.vectors.half_types import to_sum_type

__all__ = ["ReplicatedVector"]


@kernel("int64(int64, int64)")
def _advance(version: int, updates: int) -> int:
    fetch_add(version + 24, updates)
    return fetch_add(version, 1) + 1


@dataclass(frozen=True)
class ReplicatedPlan:
    """Where the vectors and their words lie; the same in every process."""

    vectors: tuple[int, ...]  # offset of each worker's vector
    words: int  # offset of the workers' words: (version, sequence, absent, updates) each on a line of its own
    num_parameters: int
    dtype: torch.dtype


class ReplicatedVector:
    """A worker's own vector `x` (P,), with a version, under a sequence lock: who copies it tries again if it was written.

    Args:
        segment: shared memory made from the layout of `plan`.
        plan: from `reserve`.
        participant_id: a worker's id; an evaluator may pass any other and only take snapshots.
        incarnation: unused here, as nothing is held that others wait for.
        abort_address: unused here, as nothing waits.
        own_models: every worker's vector is a model of its own. A snapshot is then the mean of all that are there, instead of
            worker 0's; a worker that died counts again once the one in its place has made its first update.

    Costs: a snapshot of own models copies every one of them.
    """

    def __init__(
        self,
        segment: Segment,
        plan: ReplicatedPlan,
        participant_id: int,
        incarnation: int = 0,
        abort_address: int = 0,
        *,
        own_models: bool = False,
    ) -> None:
        self._segment = segment
        self._plan = plan
        self.own_models = own_models
        self._is_worker = participant_id < len(plan.vectors)
        self._owner = participant_id if participant_id < len(plan.vectors) else 0
        self.x = segment.tensor(plan.vectors[self._owner], (plan.num_parameters,), plan.dtype)
        self._version = self._word(self._owner)
        self._absent = self._version + 16
        self._own_lock = self._lock(self._owner)
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
        """Updates applied to this worker's vector; for an onlooker at own models, the most of any worker."""
        if self.own_models and not self._is_worker:
            return max(load(self._word(worker)) for worker in range(len(self._plan.vectors)))
        return load(self._version)

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Gives every worker's vector the values of `x` (P,)."""
        for worker, offset in enumerate(self._plan.vectors):
            self._segment.tensor(offset, (self._plan.num_parameters,), self._plan.dtype).copy_(x)
            store(self._word(worker), version)

    def _lock(self, worker_id: int) -> SequenceLock:
        return SequenceLock(self._word(worker_id) + 8, "replicated.mid_write")

    def writing(self) -> AbstractContextManager[None]:
        """Marks the vector as being written."""
        return self._own_lock.writing()

    def advance(self, updates: int = 1) -> int:
        """Counts one update, or with 0 a change that is none; returns the version that it made."""
        if load(self._absent):
            store(self._absent, 0)
        return _advance(self._version, updates)

    def updates(self) -> list[int]:
        """How many updates each worker's vector has had in this memory."""
        return [load(self._word(worker) + 24) for worker in range(len(self._plan.vectors))]

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the run's model into `out` (P,); returns its version, the most of any worker where each has its own.

        Where all have the same model, a worker copies its own vector, as worker 0 may be a step behind it; others worker 0's.
        """
        if not self.own_models:
            return self.model(self._owner, out)
        first, *others = self.model_ids()
        total, x = to_sum_type(out), torch.empty_like(out)
        version = self.model(first, total)
        for worker in others:
            version = max(version, self.model(worker, x))
            total.add_(x)
        total.div_(1 + len(others))
        if total is not out:
            out.copy_(total)
        return version

    def consensus_distance(self, mean: torch.Tensor) -> float:
        """sum_i ||x_i - mean||^2 / n over the n workers that are there, `mean` (P,) from `snapshot`."""
        x, distances = torch.empty_like(self.x), []
        for worker in self.model_ids():
            self.model(worker, x)
            distances.append(float((x.double() - mean).square().sum()))
        return sum(distances) / len(distances)

    def model_ids(self) -> list[int]:
        """The workers that are there; all where none is."""
        there = [worker for worker in range(len(self._plan.vectors)) if not load(self._word(worker) + 16)]
        return there or list(range(len(self._plan.vectors)))

    def model(self, worker: int, out: torch.Tensor) -> int:
        """Copies a worker's model into `out` (P,), as nobody was writing it; returns its version."""
        x = self._segment.tensor(self._plan.vectors[worker], (self._plan.num_parameters,), self._plan.dtype)

        def copy() -> int:
            version = load(self._word(worker))
            out.copy_(x)
            return version

        return self._lock(worker).copied(copy, f"worker {worker}")

    def own(self) -> tuple[int, int, torch.Tensor]:
        """(version, updates in this memory, copy (P,)) of this worker's vector; another of its programs may be writing it."""
        copy = torch.empty_like(self.x)
        return self.model(self._owner, copy), load(self._version + 24), copy

    def restore(self, version: int, x: torch.Tensor) -> None:
        """Gives this worker's vector the values of `x` (P,), and its version."""
        with self.writing():
            self.x.copy_(x)
            store(self._version, version)

    def replace(self, x: torch.Tensor) -> None:
        """Gives every worker's vector the values of `x` (P,), once nobody writes any more; counts no update.

        From then on worker 0's is the run's: the mean of equal ones may differ from them by rounding.
        """
        for worker, offset in enumerate(self._plan.vectors):
            with self._lock(worker).writing():
                self._segment.tensor(offset, (self._plan.num_parameters,), self._plan.dtype).copy_(x)
            store(self._word(worker) + 16, int(worker > 0))

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Ends the mark of a dead worker, which is not there any more; returns whether it died while writing."""
        store(self._word(participant_id) + 16, 1)
        return self._lock(participant_id).recover()
