"""All-reduce among the workers of one machine: every worker reduces its part of the vector, then all copy all parts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from paceline.errors import WorkerLostError
from paceline.memory.atomics import load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import LINE_BYTES, Layout, Segment
from paceline.memory.waiting import raise_if_stopped, wait_briefly, wake_all

__all__ = ["LockstepPlan", "SharedMemoryCollectives"]

_REMEDY = (
    "Resume the run from its last checkpoint (`paceline train --resume RUN`), or choose an algorithm that goes on "
    "without a worker (`paceline algorithms --tolerates kill`)."
)


@dataclass(frozen=True, kw_only=True)
class LockstepPlan:
    """Where the shared areas of an all-reduce lie in their segment (offsets in bytes)."""

    num_parameters: int
    num_workers: int
    dtype: torch.dtype
    gradients: tuple[int, ...]  # one vector per worker
    mean: int
    weights: int  # float64 per worker
    arrivals: int  # one word per worker: how many barriers it has come to
    losses: int  # one word per worker: nonzero once it is lost


class SharedMemoryCollectives:
    """Weighted means over all workers in lockstep; implements `Collectives`.

    Per call: two barriers; each worker copies its vector in and the mean out, and for its own part reads one vector's
    worth in all. Memory: `num_workers + 1` vectors.
    Needs every worker every time; a lost one ends the run with `WorkerLostError`. A run that is being stopped ends between two
    rounds: waiters leave only once somebody else has left, or one would have made an update that others have not.

    The mean is `sum_k (w_k / w_f) * g_k / sum_k (w_k / w_f)`, where f is the first worker with a weight and sums run
    in the order of worker ids. With equal weights all factors are exactly 1, so it is the plain sum divided by
    their number; and weights that are sample counts take no product out of the vectors' range. One worker
    computes each component, so all get the same bits. A single weighted vector is copied, bit for bit. Without any
    weight the mean is zero. With `num_workers == 1` nothing is touched.

    Args:
        segment: the shared memory.
        plan: from `reserve`.
        participant_id: the worker.
        incarnation: accepted like elsewhere; a lockstep run does not go on with a second one.
        abort_address: word that is nonzero when the run is being stopped; 0: there is none.
        timeout_s: how long to wait for a worker that nobody has declared lost.

    Attributes:
        waited_s: seconds spent at barriers; the caller reads it and sets it back to 0.

    Reference: Das et al., "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent", 2016,
        arXiv:1602.06709 (part-reduce and part-broadcast).
    """

    def __init__(
        self,
        segment: Segment,
        plan: LockstepPlan,
        participant_id: int,
        incarnation: int = 0,
        abort_address: int = 0,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._gradients = [segment.tensor(offset, plan.num_parameters, plan.dtype) for offset in plan.gradients]
        self._mean = segment.tensor(plan.mean, plan.num_parameters, plan.dtype)
        self._weights = segment.array(plan.weights, plan.num_workers, np.float64)
        self._arrivals = segment.address + plan.arrivals
        self._losses = segment.address + plan.losses
        self._num_workers = plan.num_workers
        self._worker_id = participant_id
        self._abort = abort_address
        self._timeout_s = timeout_s
        first = plan.num_parameters * participant_id // plan.num_workers
        self._part = slice(first, plan.num_parameters * (participant_id + 1) // plan.num_workers)
        self._num_barriers = 0
        self.waited_s = 0.0

    @staticmethod
    def reserve(
        layout: Layout,
        num_parameters: int,
        num_workers: int,
        *,
        dtype: torch.dtype = torch.float32,
        name: str = "lockstep",
    ) -> LockstepPlan:
        """Reserves the vectors and words."""
        return LockstepPlan(
            num_parameters=num_parameters,
            num_workers=num_workers,
            dtype=dtype,
            gradients=tuple(
                layout.vector(f"{name}.gradient_{worker}", num_parameters, dtype) for worker in range(num_workers)
            ),
            mean=layout.vector(f"{name}.mean", num_parameters, dtype),
            weights=layout.reserve(f"{name}.weights", num_workers * 8),
            arrivals=layout.words(f"{name}.arrivals", num_workers),
            losses=layout.words(f"{name}.losses", num_workers),
        )

    def all_reduce_mean(self, vector: torch.Tensor, weight: float) -> None:
        """Replaces `vector` (P,) by the weighted mean over all workers.

        Raises:
            WorkerLostError: a worker was declared lost, or did not come within `timeout_s`.
            RunStopped: the run is being stopped, and a worker has left it.
        """
        if self._num_workers == 1:
            return
        # What is overwritten here was read by others before the second barrier of the last call, which all have passed.
        self._weights[self._worker_id] = weight
        if weight:
            self._gradients[self._worker_id].copy_(vector)
        self._barrier()
        self._reduce_part()
        self._barrier()
        vector.copy_(self._mean)

    def mark_lost(self, worker_id: int) -> None:
        """Says that this worker will not come any more: who waits for it now or later gets `WorkerLostError`."""
        store(self._losses + worker_id * LINE_BYTES, 1)
        wake_all(self._arrivals + worker_id * LINE_BYTES)

    def _reduce_part(self) -> None:
        mean = self._mean[self._part]
        weights = [float(weight) for weight in self._weights]
        weighted = [worker for worker, weight in enumerate(weights) if weight]
        if not weighted:
            mean.zero_()
            return
        first = weighted[0]
        mean.copy_(self._gradients[first][self._part])
        for worker in weighted[1:]:
            mean.add_(self._gradients[worker][self._part], alpha=weights[worker] / weights[first])
        if len(weighted) > 1:
            mean.div_(sum(weights[worker] / weights[first] for worker in weighted))

    def _barrier(self) -> None:
        self._num_barriers += 1
        own = self._arrivals + self._worker_id * LINE_BYTES
        store(own, self._num_barriers)
        wake_all(own)
        fail_point("lockstep.arrived")
        if self._all_arrived():
            return
        began_s = time.perf_counter()
        try:
            for worker in range(self._num_workers):
                self._wait_for(worker, began_s)
        finally:
            self.waited_s += time.perf_counter() - began_s

    def _wait_for(self, worker: int, began_s: float) -> None:
        word = self._arrivals + worker * LINE_BYTES
        while (arrived := load(word)) < self._num_barriers:
            if load(self._losses + worker * LINE_BYTES):
                # It may have arrived and died between our two looks; then this barrier is complete.
                if load(word) >= self._num_barriers:
                    return
                raise_if_stopped(self._abort)
                raise self._lost("has left the run (killed, or its loop ended earlier)")
            if time.perf_counter() - began_s > self._timeout_s:
                raise self._lost(f"did not come within {self._timeout_s:g} s")
            wait_briefly(word, arrived)

    def _all_arrived(self) -> bool:
        return not self._missing()

    def _missing(self) -> list[int]:
        words = (self._arrivals + worker * LINE_BYTES for worker in range(self._num_workers))
        return [worker for worker, word in enumerate(words) if load(word) < self._num_barriers]

    def _lost(self, what_happened: str) -> WorkerLostError:
        missing = self._missing()
        present = [worker for worker in range(self._num_workers) if worker not in missing]
        round_number = (self._num_barriers + 1) // 2
        return WorkerLostError(
            f"all-reduce {round_number}: {_workers(present)} arrived, {_workers(missing)} did not; "
            f"one of the missing {what_happened}. {_REMEDY}"
        )


def _workers(ids: list[int]) -> str:
    """`worker 2`, `workers 0, 1 and 3`."""
    if len(ids) == 1:
        return f"worker {ids[0]}"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"
