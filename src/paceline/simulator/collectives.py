"""All-reduce among simulated workers of one machine, in the steps of the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.errors import WorkerLostError, name_workers
from paceline.simulator.core import COPY_VECTORS, Core
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler
from paceline.vectors.half_types import add_up, sum_type

__all__ = [
    "AllReduceState",
    "SimulatedCollectives",
    "gather_into_all",
    "lost_in_collective",
    "mean_into_all",
    "sum_into_all",
    "sum_into_parts",
    "weighted_mean",
]


class _Operation(NamedTuple):
    """One that a worker has started."""

    finish: Callable[[list[Any]], None]  # gets what all workers have given
    given: Any
    num_vectors: float  # its size, in vectors of the parameters


class AllReduceState:
    """The barrier and the vectors of the present round, one for all workers."""

    def __init__(self, scheduler: Scheduler, num_workers: int, wake_s: float, spin_s: float = 0.0) -> None:
        self.num_workers = num_workers
        self._scheduler = scheduler
        self._wake_s = wake_s
        self._spin_s = spin_s
        self._waiting: list[tuple[Program, float]] = []  # and since when
        self._arrived: set[int] = set()
        self._num_barriers = 0  # that are behind all workers
        self._vectors: list[torch.Tensor | None] = [None] * num_workers
        self._weights = [0.0] * num_workers
        self._numbers = [0.0] * num_workers
        self._mean: torch.Tensor | None = None
        self._operations: list[list[_Operation]] = [[] for _ in range(num_workers)]
        self._lost: dict[int, str] = {}

    def bring(self, worker_id: int, vector: torch.Tensor, weight: float, number: float) -> None:
        """Puts a worker's vector (P,) into the round, and a number."""
        self._vectors[worker_id] = vector
        self._weights[worker_id] = weight
        self._numbers[worker_id] = number

    def barrier(self, worker_id: int, what: str) -> None:
        """Waits for all workers; the last one does not wait, the others run `wake_s` after it came, or still spin.

        Raises:
            WorkerLostError: a worker has left, and so will not come.
        """
        self._arrived.add(worker_id)
        if len(self._arrived) < self.num_workers:
            self._refuse_if_lost(what)
            number = self._num_barriers
            self._waiting.append((self._scheduler.current, self._scheduler.now_s))
            self._scheduler.wait(f"the others in {what}")
            if self._num_barriers == number:  # a loss has woken us
                self._refuse_if_lost(what)
            return
        self._arrived.clear()
        self._num_barriers += 1
        for program, since_s in self._waiting:
            spins = self._scheduler.now_s - since_s < self._spin_s
            self._scheduler.wake(program, 0.0 if spins else self._wake_s)
        self._waiting.clear()

    def lose(self, worker_id: int, reason: str) -> None:
        """The others know now that a worker is gone: whoever waits for it fails."""
        self._lost[worker_id] = reason
        if worker_id in self._arrived:
            return  # the others need not wait for it at this barrier
        for program, _ in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()

    def _refuse_if_lost(self, what: str) -> None:
        missing = {one: reason for one, reason in self._lost.items() if one not in self._arrived}
        if missing:
            raise lost_in_collective(what, sorted(self._arrived), missing)

    def mean(self) -> tuple[torch.Tensor, float]:
        """The weighted mean (P,) of the round, computed for the first who asks, as the real collectives sum it.

        And the sum of the numbers.
        """
        if self._mean is None:
            self._mean = weighted_mean(self._vectors, self._weights)
        return self._mean, sum(self._numbers)

    def bring_operations(self, worker_id: int, operations: list[_Operation]) -> None:
        """Puts what a worker has started into the round."""
        self._operations[worker_id] = operations

    def carry_out(self) -> None:
        """Carries out the round's operations for all workers, when the first asks."""
        for operations in zip(*self._operations, strict=True):
            operations[0].finish([one.given for one in operations])
        for operations in self._operations:
            operations.clear()

    def end_round(self) -> None:
        """Forgets the mean; the next round brings new vectors."""
        self._mean = None


class SimulatedCollectives:
    """Weighted means in lockstep; implements `Collectives`.

    Modelled, per worker, as `memory.lockstep` does it: copy the vector in, wait for all, read one vector's worth of parts
    and write a part of the mean, wait for all, copy the mean out. The memory bus is shared meanwhile. A single worker
    keeps its vector and takes no time. Operations that are only started are carried out at the first `wait`, all in one such
    round, as the real ones are: on cores that compute there is nothing to overlap with.

    Attributes:
        waited_s: seconds spent at barriers; the caller reads it and sets it back to 0.
    """

    def __init__(self, state: AllReduceState, core: Core) -> None:
        self._state = state
        self._core = core
        self._num_rounds = 0
        self._pending: list[_Operation] = []
        self._num_started = self._num_done = 0
        self.waited_s = 0.0

    def all_reduce_mean(self, vector: torch.Tensor, weight: float, number: float = 0.0) -> float:
        """Replaces `vector` (P,) by the weighted mean over all workers; returns the sum of their numbers."""
        state, core = self._state, self._core
        if state.num_workers == 1:
            return number
        self._num_rounds += 1
        if weight:
            core.move(COPY_VECTORS)
        state.bring(core.worker_id, vector, weight, number)
        self._barrier()
        mean, total = state.mean()  # before anyone's vector is written again
        core.move(1.0 + 1.0 / state.num_workers)
        self._barrier()
        state.end_round()
        core.move(COPY_VECTORS)
        vector.copy_(mean)
        return total

    def start_all_reduce(self, vector: torch.Tensor) -> MemoryHandle:
        """Begins replacing `vector` (n,) by the sum over all workers."""
        return self._start(sum_into_all, vector, vector)

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> MemoryHandle:
        """Begins summing `vector` (n,) over all workers into everyone's `part` (n / num_workers,)."""
        return self._start(sum_into_parts, (vector, part), vector)

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> MemoryHandle:
        """Begins collecting every worker's `part` (n / num_workers,) in `vector` (n,)."""
        return self._start(gather_into_all, (part, vector), vector)

    def _start(self, finish: Callable[[list[Any]], None], given: Any, whole: torch.Tensor) -> MemoryHandle:
        num_bytes = whole.numel() * whole.element_size() or getattr(whole, "num_bytes", None)
        num_vectors = (
            num_bytes / self._core.vector_bytes if num_bytes else 1.0
        )  # timing only: a whole vector, or as it says
        self._pending.append(_Operation(finish, given, num_vectors))
        self._num_started += 1
        return MemoryHandle(self, self._num_started)

    def carry_out(self, number: int) -> None:
        """Carries out all that has been started, unless operation `number` is done."""
        if number <= self._num_done:
            return
        state, core = self._state, self._core
        pending, self._pending, self._num_done = self._pending, [], self._num_started
        num_vectors = sum(one.num_vectors for one in pending)
        self._num_rounds += 1
        state.bring_operations(core.worker_id, pending)
        if state.num_workers == 1:
            state.carry_out()
            return
        core.move(COPY_VECTORS * num_vectors)
        self._barrier()
        state.carry_out()
        core.move((1.0 + 1.0 / state.num_workers) * num_vectors)
        self._barrier()
        core.move(COPY_VECTORS * num_vectors)

    def _barrier(self) -> None:
        scheduler = self._core.scheduler
        begun_s = scheduler.now_s
        self._core.atomic()
        self._state.barrier(self._core.worker_id, f"all-reduce {self._num_rounds}")
        self.waited_s += scheduler.now_s - begun_s


class MemoryHandle:
    """An operation that has been started; implements `Handle`."""

    def __init__(self, owner: SimulatedCollectives, number: int) -> None:
        self._owner = owner
        self._number = number

    def wait(self) -> None:
        """Returns with the result in place."""
        self._owner.carry_out(self._number)


def lost_in_collective(what: str, arrived: list[int], missing: dict[int, str]) -> WorkerLostError:
    """The error that names who will not come, and why."""
    left = ", ".join(f"worker {one} ({reason})" for one, reason in missing.items())
    there = name_workers(arrived) if arrived else "nobody"
    return WorkerLostError(
        f"{what}: {left} has left the run and will not come; arrived: {there}. Restart from the newest checkpoint, or choose"
        " an algorithm that goes on without a worker (`paceline algorithms --tolerates kill`)."
    )


def weighted_mean(vectors: list[torch.Tensor | None], weights: list[float]) -> torch.Tensor:
    """sum_k (w_k / w_f) g_k / sum_k (w_k / w_f), f the first with a weight, in the order of worker ids.

    Of half types it is float32.
    """
    given = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if vector is not None]
    weighted = [(vector, weight) for vector, weight in given if weight]
    if not weighted:
        return torch.zeros_like(given[0][0])
    first_vector, first_weight = weighted[0]
    mean = first_vector.to(sum_type(first_vector.dtype), copy=True)
    for vector, weight in weighted[1:]:
        mean.add_(vector, alpha=weight / first_weight)
    if len(weighted) > 1:
        mean.div_(sum(weight / first_weight for _, weight in weighted))
    return mean


def sum_into_all(vectors: list[torch.Tensor]) -> None:
    """Every vector (n,) becomes the sum of all."""
    total = _sum(vectors)
    for vector in vectors:
        vector.copy_(total)


def mean_into_all(given: list[tuple[torch.Tensor, float, torch.Tensor]]) -> None:
    """Every vector (n,) becomes the weighted mean of all, every number (1,) the sum of all."""
    vectors, weights, numbers = zip(*given, strict=True)
    mean, total = weighted_mean(list(vectors), list(weights)), sum(number.item() for number in numbers)
    for vector, _, number in given:
        vector.copy_(mean)
        number.fill_(total)


def sum_into_parts(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Everyone's part (n / num_workers,) becomes that of the sum of all vectors (n,)."""
    pieces = _sum([vector for vector, _ in given]).chunk(len(given))
    for (_, part), piece in zip(given, pieces, strict=False):
        part.copy_(piece)


def gather_into_all(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Every vector (n,) becomes all parts (n / num_workers,), one after the other."""
    whole = torch.cat([part for part, _ in given])
    for _, vector in given:
        vector.copy_(whole)


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(vectors[0])
    add_up(vectors, total)
    return total
