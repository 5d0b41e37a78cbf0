"""All-reduce among simulated workers of one machine, in the steps of the real one."""

from __future__ import annotations

import torch

from paceline.errors import WorkerLostError, name_workers
from paceline.ports.started import CarriedOutTogether, Operation
from paceline.simulator.hardware.core import COPY_VECTORS, Core
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler
from paceline.vectors.half_types import add_up, mean_into, sum_type

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
        self._operations: list[list[Operation]] = [[] for _ in range(num_workers)]
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
        """The others know now that a worker is gone: programs that wait for it fail."""
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
        """The weighted mean (P,) of the round, computed for the first that asks, as the real collectives sum it.

        And the sum of the numbers.
        """
        if self._mean is None:
            self._mean = weighted_mean(self._vectors, self._weights)
        return self._mean, sum(self._numbers)

    def bring_operations(self, worker_id: int, operations: list[Operation]) -> None:
        """Puts what a worker has started into the round."""
        self._operations[worker_id] = operations

    def carry_out(self) -> None:
        """Carries out the round's operations for all workers, when the first asks."""
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
        """Forgets the mean; the next round brings new vectors."""
        self._mean = None


class SimulatedCollectives(CarriedOutTogether):
    """Weighted means in lockstep; implements `Collectives`.

    Modelled, per worker, as `memory.lockstep` does it: copy the vector in, wait for all, read one vector's worth of parts
    and write a part of the mean, wait for all, copy the mean out. The memory bus is shared meanwhile. A single worker
    keeps its vector and takes no time.

    Attributes:
        waited_s: seconds spent at barriers; the caller reads it and sets it back to 0.
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
        """Its size, in vectors of the parameters; where only time is simulated, a whole one, or as it says."""
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
    mean = torch.empty_like(given[0][0], dtype=sum_type(given[0][0].dtype))
    mean_into(mean, [(vector, weight) for vector, weight in given if weight])
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


def exchange_all(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What worker k takes (n,) becomes every worker's k-th piece of what it gives (n,), in the order of their ids."""
    pieces = [vector.chunk(len(given)) for vector, _ in given]
    if given[0][0].numel():
        for worker, (_, taken) in enumerate(given):
            torch.cat([own[worker] for own in pieces], out=taken)


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(vectors[0])
    add_up(vectors, total)
    return total
