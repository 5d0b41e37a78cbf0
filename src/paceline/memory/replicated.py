"""One parameter vector per worker, in shared memory so that others can read it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.memory.atomics import fetch_add, kernel, load, store
from paceline.memory.segment import Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.sequence import SequenceLock
from paceline.optim.half_types import to_sum_type


@kernel("int64(int64, int64)")
def _advance(version: int, updates: int) -> int:
    fetch_add(version + 24, updates)
    return fetch_add(version, 1) + 1


class ReplicatedVector(SegmentPart[PartPlan]):
    """A worker's own vector `x` (P,), with a version, under a sequence lock: a copy is made again if it was written meanwhile.

    Args:
        own_models: every worker's vector is its own model. A snapshot is then the mean over all present workers instead of
            one worker's vector; a dead worker counts again once its successor has made its first update.

    Costs: a snapshot of own models copies every one of them.
    """

    def __init__(self, *place: Any, own_models: bool = False, **named: Any) -> None:
        super().__init__(*place, **named)
        self.own_models = own_models
        self._is_worker = self._participant < self._plan.num_writers
        own = self._participant if self._is_worker else 0
        self.x = self._vector(f"x{own}")
        self._version = self._word("words", own)
        self._absent = self._version + 16
        self._own_lock = self._lock(own)
        self.waited_s = 0.0

    @property
    def _owner(self) -> int:
        """Whose vector this participant sees: its own; an observer, that of the first worker that is alive."""
        return self._participant if self._is_worker else self.model_ids()[0]

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        """One vector for each worker; evaluators, the last participants, have none."""
        workers = range(plan.num_writers)
        vectors = {f"x{n}": layout.vector(f"replicated.x{n}", plan.num_parameters, plan.dtype) for n in workers}
        # The words of each worker, on a line of its own: version, sequence, absent, updates, and, where the others go on
        # without it, the last version that it has a part in, plus 1.
        return {**vectors, "words": layout.words("replicated.words", plan.num_writers)}

    @property
    def version(self) -> int:
        """Updates applied to this participant's vector; for an observer of own models, the most of any worker."""
        if self._is_worker:
            return load(self._version)
        workers = range(self._plan.num_writers) if self.own_models else [self._owner]
        return max(load(self._word("words", worker)) for worker in workers)

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        for worker in range(self._plan.num_writers):
            self._vector(f"x{worker}").copy_(x)
            store(self._word("words", worker), version)

    def _lock(self, worker_id: int) -> SequenceLock:
        return SequenceLock(self._word("words", worker_id) + 8, "replicated.mid_write")

    def writing(self) -> AbstractContextManager[None]:
        return self._own_lock.writing()

    def advance(self, updates: int = 1) -> int:
        if load(self._absent):
            store(self._absent, 0)
        return _advance(self._version, updates)

    def go_on_with(self, members: Sequence[int]) -> None:
        for worker in range(self._plan.num_writers):
            last = self._word("words", worker) + 32
            if worker not in members and not load(last):
                store(last, self.version + 1)

    def enter(self, giver: int) -> None:
        """Takes part again as a dead worker's replacement, with another worker's vector."""
        x = torch.empty_like(self.x)
        self.restore(self.copy_of(giver, x), x)
        store(self._version + 32, 0)
        store(self._absent, 0)

    def last_version_of(self, worker: int) -> int | None:
        """The last update in which a dead worker has a part; None: the others have made none without it."""
        word = load(self._word("words", worker) + 32)
        return word - 1 if word else None

    def updates(self) -> list[int]:
        return [load(self._word("words", worker) + 24) for worker in range(self._plan.num_writers)]

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the run's model into `out` (P,); returns its version, the most of any worker where each has its own.

        If all have the same model, a worker copies its own vector, as others may be a step behind it; an observer copies that
        of the first worker that is alive.
        """
        if not self.own_models:
            return self.copy_of(self._owner, out)
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
        x, distances = torch.empty_like(mean), []
        for worker in self.model_ids():
            self.model(worker, x)
            distances.append(float((x.double() - mean).square().sum()))
        return sum(distances) / len(distances)

    def model_ids(self) -> list[int]:
        """The present workers; if none is present, all, the one with the newest model first."""
        workers = range(self._plan.num_writers)
        there = [worker for worker in workers if not load(self._word("words", worker) + 16)]
        return there or sorted(workers, key=lambda worker: -load(self._word("words", worker)))

    def model(self, worker: int, out: torch.Tensor) -> int:
        return self.copy_of(worker, out)

    def copy_of(self, worker: int, out: torch.Tensor) -> int:
        """Copies a worker's vector into `out` (P,), consistent with one version; returns that version."""
        x = self._vector(f"x{worker}")

        def copy() -> int:
            version = load(self._word("words", worker))
            out.copy_(x)
            return version

        return self._lock(worker).copied(copy, f"worker {worker}")

    def own(self) -> tuple[int, int, torch.Tensor]:
        """(version, updates in this memory, copy (P,)) of this worker's vector, which a background program may be writing."""
        copy = torch.empty_like(self.x)
        return self.copy_of(self._owner, copy), load(self._version + 24), copy

    def restore(self, version: int, x: torch.Tensor) -> None:
        with self.writing():
            self.x.copy_(x)
            store(self._version, version)

    def replace(self, x: torch.Tensor) -> None:
        """Gives every worker's vector the values of `x` (P,), once all writes have ended; counts no update.

        From then on worker 0's vector is the run's: the mean of equal vectors may differ from them by rounding.
        """
        for worker in range(self._plan.num_writers):
            with self._lock(worker).writing():
                self._vector(f"x{worker}").copy_(x)
            store(self._word("words", worker) + 16, int(worker > 0))

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Marks a dead worker as absent and ends its write; returns whether it died while writing."""
        store(self._word("words", participant_id) + 16, 1)
        return self._lock(participant_id).recover()
