"""All-reduce among simulated workers of one machine, step by step as the real one works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import WorkerLostError, name_workers
from paceline.optim.half_types import add_up, mean_into, sum_type
from paceline.ports.ports import NO_NUMBERS
from paceline.ports.started import CarriedOutTogether, Operation
from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.core import COPY_VECTORS, Core
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler

Step = tuple[Callable[[list[Any]], None], Any]
"""What carries an operation out, given all workers' parts, and one worker's part."""


class AllReduceState:
    """The barrier and the operations of the current round, shared by all workers.

    Attributes:
        members: the workers that came to the last barrier that is behind them; at first, all.
        num_barriers: that are behind all members.
        on_arrival: called with each worker that comes to a barrier, which may end there.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, spin_s: float, survivors_continue: bool) -> None:
        self.num_workers = cluster.workers
        self.members: Sequence[int] = range(cluster.workers)
        self._scheduler = scheduler
        self._wake_s = cluster.wake_s
        self._spin_s = spin_s
        self._waiting: list[tuple[Program, float]] = []  # and since when
        self._arrived: set[int] = set()
        self.num_barriers = 0
        self.on_arrival: Callable[[int], None] = lambda worker_id: None
        self._steps: list[list[Step]] = [[] for _ in self.members]
        self._lost: dict[int, str] = {}
        self._survivors_continue = survivors_continue
        self._dead: set[int] = set()  # members without whom the others go on
        self._died = [-1] * cluster.workers  # the last incarnation of each that has died

    def bring(self, worker_id: int, steps: list[Step]) -> None:
        self._steps[worker_id] = steps

    def barrier(self, worker_id: int, what: str) -> None:
        """Waits for all members; the last to arrive does not wait. Others continue `wake_s` later, or at once if they spin.

        Raises:
            WorkerLostError: a worker has left.
        """
        self.on_arrival(worker_id)
        self._arrived.add(worker_id)
        if self._pass_if_complete():
            return
        self._refuse_if_lost(what)
        number = self.num_barriers
        self._waiting.append((self._scheduler.current, self._scheduler.now_s))
        self._scheduler.wait(f"the others in {what}")
        if self.num_barriers == number:  # a loss has woken us
            self._refuse_if_lost(what)

    def _pass_if_complete(self) -> bool:
        missing = self._dead - self._arrived
        if len(self._arrived) + len(missing) < len(self.members):
            return False
        if missing:
            self.members = sorted(self._arrived)
            self._dead -= missing
        self._arrived.clear()
        self.num_barriers += 1
        for program, since_s in self._waiting:
            spins = self._scheduler.now_s - since_s < self._spin_s
            self._scheduler.wake(program, 0.0 if spins else self._wake_s)
        self._waiting.clear()
        return True

    def lose(self, worker_id: int, reason: str, *, died: int | None = None) -> None:
        """Records that a worker is gone: programs that wait for it fail, or may continue if its incarnation `died` is dead."""
        if died is not None and self._survivors_continue and worker_id not in self._lost:
            self._died[worker_id] = died
            if worker_id not in self.members:  # a replacement that waited
                return
            self._dead.add(worker_id)
            self._pass_if_complete()
            return
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

    def let_in(self, newcomers: Mapping[int, int]) -> None:
        """Takes replacements into the next round, with their incarnations; one may have died since it was accepted."""
        self.members = sorted({*self.members, *newcomers})
        self._dead.update(worker for worker, incarnation in newcomers.items() if self._died[worker] >= incarnation)

    def carry_out(self) -> None:
        """Executes the round's operations for all members, in the order in which the real collectives sum.

        The first caller does the work.
        """
        for steps in zip(*(self._steps[one] for one in self.members), strict=True):
            steps[0][0]([given for _, given in steps])
        for steps in self._steps:
            steps.clear()


class SimulatedCollectives(CarriedOutTogether):
    """Weighted means in lockstep; implements `Collectives`.

    Modelled, per worker, like `memory.lockstep`: copy the vector in, wait for all, read parts that add up to one vector and
    write a part of the mean, wait for all, copy the mean out. All copies share the memory bus. A single worker keeps its
    vector and takes no time. The others also do a dead worker's part, and then wait for each other once more.
    """

    def __init__(self, state: AllReduceState, core: Core) -> None:
        super().__init__()
        self._state = state
        self._core = core
        self._num_rounds = 0
        self.members = state.members  # the workers whose vectors the last operation contains
        self.waited_s = 0.0  # seconds spent at barriers; the caller reads it and resets it to 0

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        if self._state.num_workers == 1:
            return list(numbers)
        totals = list(numbers)
        self._meet([(mean_into_all, (vector, weight, totals))], float(weight != 0), 1.0)
        return totals

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        self._state.let_in(newcomers)
        self.members = self._state.members
        return {"_num_rounds": self._num_rounds}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next operation on, with what `let_in` returned."""
        vars(self).update(given)
        self.members = self._state.members

    def _carry_out(self, operations: list[Operation]) -> None:
        num_vectors = sum(map(self._num_vectors, operations))
        place = self._core.worker_id, self._state.num_workers
        self._meet([_STEPS[one.kind](one, *place) for one in operations], num_vectors, num_vectors)

    def _meet(self, steps: list[Step], num_given: float, num_vectors: float) -> None:
        state, core = self._state, self._core
        self._num_rounds += 1
        state.bring(core.worker_id, steps)
        if state.num_workers == 1:
            state.carry_out()
            return
        core.move(COPY_VECTORS * num_given)
        self._barrier()
        self.members = state.members
        state.carry_out()
        part = (1.0 + 1.0 / len(self.members)) * num_vectors
        core.move(part)
        self._barrier()
        core.move(COPY_VECTORS * num_vectors)
        num_dead = len(self.members) - len(state.members)
        if num_dead > 0:  # fewer than 0: another worker has let newcomers in meanwhile
            core.move(part * num_dead)
            self._barrier()

    def living(self) -> Sequence[int]:
        if self._state.num_workers > 1:
            self._barrier()
            self.members = self._state.members
        return self.members

    def kept(self, worker: int) -> int:
        """As in `Survivors`: the steps since the last mean."""
        return 0

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
        " an algorithm that continues without a worker (`paceline algorithms --tolerates kill`)."
    )


def sum_into_all(vectors: list[torch.Tensor]) -> None:
    """Sets every vector (n,) to the sum of all."""
    total = _sum(vectors)
    for vector in vectors:
        vector.copy_(total)


def mean_into_all(given: list[tuple[torch.Tensor, float, list[float]]]) -> None:
    """Sets every vector (n,) to the weighted mean of all, and every worker's numbers to the sums of all.

    The mean is sum_k (w_k / w_f) g_k / sum_k (w_k / w_f) in worker order, where f is the first worker with a weight; it is
    computed in float32 for half-precision vectors.
    """
    first, totals = given[0][0], [sum(said) for said in zip(*(numbers for _, _, numbers in given), strict=True)]
    mean = torch.empty_like(first, dtype=sum_type(first.dtype))
    mean_into(mean, [(vector, weight) for vector, weight, _ in given if weight])
    for vector, _, numbers in given:
        vector.copy_(mean)
        numbers[:] = totals


def sum_into_parts(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Reduce-scatter: sets each worker's part (n / num_workers,) to its part of the sum of all vectors (n,)."""
    pieces = _sum([vector for vector, _ in given]).chunk(len(given))
    for (_, part), piece in zip(given, pieces, strict=False):
        part.copy_(piece)


Pieces = tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""A worker, and for each worker what it gives and what it takes."""


def pieces_of(worker: int, num_workers: int, given: torch.Tensor, taken: torch.Tensor) -> Pieces:
    """Of an all-gather, in which all workers take the whole of `given`, or of an all-to-all."""
    is_part = given.numel() < taken.numel()
    return worker, [given] * num_workers if is_part else given.chunk(num_workers), taken.chunk(num_workers)


def exchange_pieces(given: list[Pieces]) -> None:
    """All-gather and all-to-all: each worker gets what every worker has for it."""
    for sender, pieces, _ in given:
        for receiver, _, taken in given:
            taken[sender].copy_(pieces[receiver])


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(vectors[0])
    add_up(vectors, total)
    return total


_STEPS: dict[str, Callable[[Operation, int, int], Step]] = {
    "all-reduce": lambda one, _, __: (sum_into_all, one.vector),
    "reduce-scatter": lambda one, _, __: (sum_into_parts, (one.vector, one.part)),
    "all-gather": lambda one, worker, n: (exchange_pieces, pieces_of(worker, n, one.part, one.vector)),
    "all-to-all": lambda one, worker, n: (exchange_pieces, pieces_of(worker, n, one.vector, one.part)),
}
