"""All-reduce among simulated workers of one machine, step by step as the real one works."""

from __future__ import annotations

import torch

from paceline.errors import WorkerLostError, name_workers
from paceline.optim.half_types import add_up, mean_into, sum_type
from paceline.ports.started import CarriedOutTogether, Operation
from paceline.simulator.hardware.core import COPY_VECTORS, Core
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler

__all__ = [
    "AllReduceState",
    "SimulatedCollectives",
    "exchange_all",
    "gather_into_all",
    "lost_in_collective",
    "mean_into_all",
    "sum_into_all",
    "sum_into_parts",
    "weighted_mean",
]


class AllReduceState:
    """The barrier and the vectors of the current round, shared by all workers."""

    def __init__(self, scheduler: Scheduler, num_workers: int, wake_s: float, spin_s: float) -> None:
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
        self._operations: list[list[Operation]] = [[] for _ in range(num_workers)]
        self._lost: dict[int, str] = {}

    def bring(self, worker_id: int, vector: torch.Tensor, weight: float, number: float) -> None:
        """Adds a worker's vector (P,) and a number to the round."""
        self._vectors[worker_id] = vector
        self._weights[worker_id] = weight
        self._numbers[worker_id] = number

    def barrier(self, worker_id: int, what: str) -> None:
        """Waits for all workers; the last to arrive does not wait. Others go on `wake_s` later, or at once if still spinning.

        Raises:
            WorkerLostError: a worker has left.
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
        """Records that a worker is gone: programs that wait for it fail."""
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
        """The weighted mean (P,) of the round and the sum of the numbers.

        The first caller computes them, in the order in which the real collectives sum.
        """
        if self._mean is None:
            self._mean = weighted_mean(self._vectors, self._weights)
        return self._mean, sum(self._numbers)

    def bring_operations(self, worker_id: int, operations: list[Operation]) -> None:
        """Adds the operations that a worker has started to the round."""
        self._operations[worker_id] = operations

    def carry_out(self) -> None:
        """Executes the round's operations for all workers; the first caller does the work."""
        for operations in zip(*self._operations, strict=True):
            match operations[0].kind:
                case "all-reduce":
                    sum_into_all([one.vector for one in operations])
                case "reduce-scatter":
                    sum_into_parts([(one.vector, one.part) for one in operations])
                case "all-gather":
                    gather_into_all([(one.part, one.vector) for one in operations])
                case "all-to-all":
                    exchange_all([(one.vector, one.part) for one in operations])
        for operations in self._operations:
            operations.clear()

    def end_round(self) -> None:
        """Discards the mean; the next round brings new vectors."""
        self._mean = None


class SimulatedCollectives(CarriedOutTogether):
    """Weighted means in lockstep; implements `Collectives`.

    Modelled, per worker, like `memory.lockstep`: copy the vector in, wait for all, read parts that add up to one vector and
    write a part of the mean, wait for all, copy the mean out. All copies share the memory bus. A single worker keeps its
    vector and takes no time.

    Attributes:
        waited_s: seconds spent at barriers; the caller reads it and resets it to 0.
    """

    def __init__(self, state: AllReduceState, core: Core) -> None:
        super().__init__()
        self._state = state
        self._core = core
        self._num_rounds = 0
        self.waited_s = 0.0

    def all_reduce_mean(self, vector: torch.Tensor, weight: float, number: float = 0.0) -> float:
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

    def _carry_out(self, operations: list[Operation]) -> None:
        state, core = self._state, self._core
        num_vectors = sum(map(self._num_vectors, operations))
        self._num_rounds += 1
        state.bring_operations(core.worker_id, operations)
        if state.num_workers == 1:
            state.carry_out()
            return
        core.move(COPY_VECTORS * num_vectors)
        self._barrier()
        state.carry_out()
        core.move((1.0 + 1.0 / state.num_workers) * num_vectors)
        self._barrier()
        core.move(COPY_VECTORS * num_vectors)

    def _num_vectors(self, operation: Operation) -> float:
        """The operation's size in parameter vectors; if only time is simulated, 1 or what the operation states."""
        whole = operation.vector
        num_bytes = whole.numel() * whole.element_size() or getattr(whole, "num_bytes", None)
        return num_bytes / self._core.vector_bytes if num_bytes else getattr(whole, "share", 1.0)

    def _barrier(self) -> None:
        scheduler = self._core.scheduler
        begun_s = scheduler.now_s
        self._core.atomic()
        self._state.barrier(self._core.worker_id, f"all-reduce {self._num_rounds}")
        self.waited_s += scheduler.now_s - begun_s


def lost_in_collective(what: str, arrived: list[int], missing: dict[int, str]) -> WorkerLostError:
    """The error that names the workers that will not come, and why."""
    left = ", ".join(f"worker {one} ({reason})" for one, reason in missing.items())
    there = name_workers(arrived) if arrived else "none"
    return WorkerLostError(
        f"{what}: {left} has left the run and will not come; arrived: {there}. Restart from the newest checkpoint, or choose"
        " an algorithm that goes on without a worker (`paceline algorithms --tolerates kill`)."
    )


def weighted_mean(vectors: list[torch.Tensor | None], weights: list[float]) -> torch.Tensor:
    """sum_k (w_k / w_f) g_k / sum_k (w_k / w_f) in worker order, where f is the first worker with a weight.

    The result is float32 for half-precision vectors.
    """
    given = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if vector is not None]
    mean = torch.empty_like(given[0][0], dtype=sum_type(given[0][0].dtype))
    mean_into(mean, [(vector, weight) for vector, weight in given if weight])
    return mean


def sum_into_all(vectors: list[torch.Tensor]) -> None:
    """Sets every vector (n,) to the sum of all."""
    total = _sum(vectors)
    for vector in vectors:
        vector.copy_(total)


def mean_into_all(given: list[tuple[torch.Tensor, float, torch.Tensor]]) -> None:
    """Sets every vector (n,) to the weighted mean of all, and every number (1,) to the sum of all."""
    vectors, weights, numbers = zip(*given, strict=True)
    mean, total = weighted_mean(list(vectors), list(weights)), sum(number.item() for number in numbers)
    for vector, _, number in given:
        vector.copy_(mean)
        number.fill_(total)


def sum_into_parts(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Reduce-scatter: sets each worker's part (n / num_workers,) to its part of the sum of all vectors (n,)."""
    pieces = _sum([vector for vector, _ in given]).chunk(len(given))
    for (_, part), piece in zip(given, pieces, strict=False):
        part.copy_(piece)


def gather_into_all(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All-gather: sets every vector (n,) to the concatenation of all parts (n / num_workers,)."""
    whole = torch.cat([part for part, _ in given])
    for _, vector in given:
        vector.copy_(whole)


def exchange_all(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All-to-all: worker k receives (n,) the k-th piece of every worker's input (n,), in worker order."""
    pieces = [vector.chunk(len(given)) for vector, _ in given]
    if given[0][0].numel():
        for worker, (_, taken) in enumerate(given):
            torch.cat([own[worker] for own in pieces], out=taken)


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(vectors[0])
    add_up(vectors, total)
    return total
