"""All-reduce among simulated workers of one machine, in the steps of the real one."""

from __future__ import annotations

import torch

from paceline.errors import WorkerLostError
from paceline.simulator.core import COPY_VECTORS, Core
from paceline.simulator.scheduler import Program, Scheduler

__all__ = ["AllReduceState", "SimulatedCollectives", "weighted_mean"]


class AllReduceState:
    """The barrier and the vectors of the present round, one for all workers."""

    def __init__(self, scheduler: Scheduler, num_workers: int, wake_s: float) -> None:
        self.num_workers = num_workers
        self._scheduler = scheduler
        self._wake_s = wake_s
        self._waiting: list[Program] = []
        self._num_arrived = 0
        self._vectors: list[torch.Tensor | None] = [None] * num_workers
        self._weights = [0.0] * num_workers
        self._mean: torch.Tensor | None = None
        self._lost: dict[int, str] = {}

    def bring(self, worker_id: int, vector: torch.Tensor, weight: float) -> None:
        """Puts a worker's vector (P,) into the round."""
        self._vectors[worker_id] = vector
        self._weights[worker_id] = weight

    def barrier(self, what: str) -> None:
        """Waits for all workers; the last one does not wait, the others run `wake_s` after it came."""
        self._num_arrived += 1
        if self._num_arrived < self.num_workers:
            self._refuse_if_lost(what)
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait(what)
            self._refuse_if_lost(what)
            return
        self._num_arrived = 0
        for program in self._waiting:
            self._scheduler.wake(program, self._wake_s)
        self._waiting.clear()

    def lose(self, worker_id: int, reason: str) -> None:
        """The others know now that a worker is gone: whoever waits for it fails."""
        self._lost[worker_id] = reason
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()

    def _refuse_if_lost(self, what: str) -> None:
        if self._lost:
            lost = ", ".join(f"worker {one} ({reason})" for one, reason in self._lost.items())
            raise WorkerLostError(
                f"Waited for {what}: {lost} will not come. Restart from the newest checkpoint, or choose an algorithm that"
                " goes on without it."
            )

    def mean(self) -> torch.Tensor:
        """The weighted mean (P,) of the round, computed for the first who asks, as the real collectives sum it."""
        if self._mean is None:
            self._mean = weighted_mean(self._vectors, self._weights)
        return self._mean

    def end_round(self) -> None:
        """Forgets the mean; the next round brings new vectors."""
        self._mean = None


class SimulatedCollectives:
    """Weighted means in lockstep; implements `Collectives`.

    Modelled, per worker, as `memory.lockstep` does it: copy the vector in, wait for all, read one vector's worth of parts
    and write a part of the mean, wait for all, copy the mean out. The memory bus is shared meanwhile. A single worker
    keeps its vector and takes no time.

    Attributes:
        waited_s: seconds spent at barriers; the caller reads it and sets it back to 0.
    """

    def __init__(self, state: AllReduceState, core: Core) -> None:
        self._state = state
        self._core = core
        self._num_rounds = 0
        self.waited_s = 0.0

    def all_reduce_mean(self, vector: torch.Tensor, weight: float) -> None:
        """Replaces `vector` (P,) by the weighted mean over all workers."""
        state, core = self._state, self._core
        if state.num_workers == 1:
            return
        self._num_rounds += 1
        if weight:
            core.move(COPY_VECTORS)
        state.bring(core.worker_id, vector, weight)
        self._barrier()
        mean = state.mean()  # before anyone's vector is written again
        core.move(1.0 + 1.0 / state.num_workers)
        self._barrier()
        state.end_round()
        core.move(COPY_VECTORS)
        vector.copy_(mean)

    def _barrier(self) -> None:
        scheduler = self._core.scheduler
        begun_s = scheduler.now_s
        self._core.atomic()
        self._state.barrier(f"the others in all-reduce {self._num_rounds}")
        self.waited_s += scheduler.now_s - begun_s


def weighted_mean(vectors: list[torch.Tensor | None], weights: list[float]) -> torch.Tensor:
    """sum_k (w_k / w_f) g_k / sum_k (w_k / w_f), f the first with a weight, in the order of worker ids."""
    given = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if vector is not None]
    weighted = [(vector, weight) for vector, weight in given if weight]
    if not weighted:
        return torch.zeros_like(given[0][0])
    first_vector, first_weight = weighted[0]
    mean = first_vector.clone()
    for vector, weight in weighted[1:]:
        mean.add_(vector, alpha=weight / first_weight)
    if len(weighted) > 1:
        mean.div_(sum(weight / first_weight for _, weight in weighted))
    return mean
