"""Collective operations over the simulated network: exact sums, at the time at which a ring or a tree completes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch

from paceline.errors import WorkerLostError
from paceline.optim.half_types import sum_type
from paceline.ports.ports import NO_NUMBERS, Counts
from paceline.simulator.cluster import Cluster
from paceline.simulator.collectives import (
    exchange_pieces,
    lost_in_collective,
    mean_into_all,
    pieces_of,
    sum_into_all,
    sum_into_parts,
)
from paceline.simulator.network import HEADER_BYTES
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler

_UNDER_WAY = 2  # concurrent operations: a group of Gloo has two threads for each network device


class Cost(NamedTuple):
    """The cost of one operation for every worker."""

    time_s: float  # alone on the network
    sending_s: float  # the part of it in which its bytes occupy the links
    messages: int
    sent_bytes: float


class CollectiveCosts:
    """The time of an operation on vectors of B bytes among n workers after all have joined; the slowest link decides.

    ring    all-reduce: 2 (n - 1) rounds of B / n bytes from each worker to the next; reduce-scatter, all-gather and
            all-to-all: half of them
    tree    all-reduce: ceil(log2 n) rounds of B bytes to the root and as many back; reduce-scatter and all-gather: halving
            and doubling, ceil(log2 n) rounds of (n - 1) / n * B bytes in all

    A switch with limited bandwidth is shared by all messages of a round: n in a ring, n / 2 in a tree.
    """

    def __init__(self, cluster: Cluster, kind: Literal["ring", "tree"]) -> None:
        n = self._num_workers = cluster.workers
        self._kind = kind
        self._num_rounds = math.ceil(math.log2(n)) if n > 1 else 0
        if kind == "ring":
            pairs = {tuple(sorted((one, (one + 1) % n))) for one in range(n)}
        else:
            pairs = {(one & (one - 1), one) for one in range(1, n)}  # binomial: the parent lacks the lowest bit
        factor, *slowest = max(
            ((factor, a, b) for a, b, factor in cluster.link_factors if (a, b) in pairs and factor > 1), default=(1.0,)
        )
        # The two workers at the slowest link, each with the other; empty if all are alike.
        self.behind_slowest = {slowest[0]: slowest[1], slowest[1]: slowest[0]} if slowest else {}
        self._latency_s = cluster.latency_s * factor
        rate = cluster.bandwidth_bytes_per_s / factor
        if cluster.switch_bytes_per_s is not None:
            rate = min(rate, cluster.switch_bytes_per_s / (n if kind == "ring" else max(1, n // 2)))
        self._s_per_byte = 1.0 / rate
        self.links = pairs  # pairs of workers, ascending, that exchange messages
        self.all_reduce = cache(self._all_reduce)  # maps bytes to the cost; a gradient's buckets have few sizes
        self.half = cache(self._half)  # likewise, of a reduce-scatter, an all-gather or an all-to-all

    def _all_reduce(self, num_bytes: float) -> Cost:
        if self._kind == "ring":
            return self._rounds(2 * (self._num_workers - 1), num_bytes / self._num_workers)
        return self._rounds(2 * self._num_rounds, num_bytes)

    def _half(self, num_bytes: float) -> Cost:
        n = self._num_workers
        if self._kind == "ring":
            return self._rounds(n - 1, num_bytes / n)
        return self._rounds(self._num_rounds, num_bytes * (n - 1) / n / max(1, self._num_rounds))

    def _rounds(self, number: int, num_bytes: float) -> Cost:
        message_bytes = HEADER_BYTES + num_bytes
        sending_s = number * message_bytes * self._s_per_byte
        return Cost(number * self._latency_s + sending_s, sending_s, number, number * message_bytes)


@dataclass(eq=False)
class JoinedOperation:
    """One operation that all workers join."""

    given: list[Any]
    num_left: int  # workers that have yet to wait for it
    finish: Callable[[list[Any]], None]
    arrived: set[int] = field(default_factory=set)
    done_s: float = math.inf
    waiting: list[Program] = field(default_factory=list)


class NetworkCollectivesState:
    """The operations in progress, in the order in which they began; one for all workers."""

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self.scheduler = scheduler
        self.num_workers = num_workers
        self._operations: dict[int, JoinedOperation] = {}
        self._free_s = 0.0  # when the links become idle
        self._ends_s = [0.0] * _UNDER_WAY  # of the last operations, one per thread
        self.lost: dict[int, str] = {}
        self._cut = ""  # the link that is cut, and since when: no operation completes any more
        self._is_cut_known = False

    def join(self, number: int, worker_id: int, given: Any, finish: Callable[[list[Any]], None], cost: Cost) -> None:
        """A worker begins its operation of this number; the last worker completes it for all."""
        operation = self._operations.get(number)
        if operation is None:
            nothing = [None] * self.num_workers
            operation = self._operations[number] = JoinedOperation(nothing, self.num_workers, finish)
        if operation.finish is not finish:
            self._refuse_other(number, operation, worker_id, finish)
        operation.given[worker_id] = given
        operation.arrived.add(worker_id)
        if len(operation.arrived) < self.num_workers or self._cut:
            return
        finish(operation.given)
        operation.given.clear()
        operation.done_s = self._done_s(cost)
        self._wake_all(operation, operation.done_s - self.scheduler.now_s)

    def _refuse_other(
        self, number: int, operation: JoinedOperation, worker_id: int, finish: Callable[[list[Any]], None]
    ) -> None:
        """Detects workers that have ended their loops and average their models while others still average in training."""
        have_ended = {worker_id} if finish is mean_into_all else operation.arrived
        train = (operation.arrived | {worker_id}) - have_ended
        why = dict.fromkeys(sorted(have_ended), "its loop has ended")
        raise lost_in_collective(f"collective operation {number}", sorted(train), why)

    def _wake_all(self, operation: JoinedOperation, after_s: float = 0.0) -> None:
        for program in operation.waiting:
            self.scheduler.wake(program, after_s)
        operation.waiting.clear()

    def _done_s(self, cost: Cost) -> float:
        """The completion time of an operation that all workers have joined now.

        It begins once a thread is free. It takes at least its own time, and completes only after the links have carried
        the operations that began before it, and then its own bytes.
        """
        begun_s = max(self.scheduler.now_s, min(self._ends_s))
        self._free_s = max(begun_s, self._free_s) + cost.sending_s
        done_s = max(begun_s + cost.time_s, self._free_s)
        self._ends_s.remove(min(self._ends_s))
        self._ends_s.append(done_s)
        return done_s

    def wait(self, number: int) -> None:
        operation, scheduler = self._operations[number], self.scheduler
        if operation.done_s == math.inf:
            scheduler.catch_up()
        if operation.done_s == math.inf:
            self._refuse_if_lost(number, operation)
            operation.waiting.append(scheduler.current)
            scheduler.wait(f"the others in collective operation {number}")
            if operation.done_s == math.inf:
                self._refuse_if_lost(number, operation)
        elif operation.done_s > scheduler.time_s():
            scheduler.sleep(operation.done_s - scheduler.time_s())
        operation.num_left -= 1
        if not operation.num_left:
            del self._operations[number]

    def lose(self, worker_id: int, reason: str, *, died: int | None = None) -> None:
        """Records that a worker is gone: programs that wait for it fail, even if it has `died`, as on real networks."""
        self.lost[worker_id] = reason
        for operation in self._operations.values():
            if operation.done_s == math.inf and worker_id not in operation.arrived:
                self._wake_all(operation)

    def cut(self, link: tuple[int, int], detection_s: float) -> None:
        """Cuts a link: operations that all workers have joined still complete; others fail `detection_s` later."""
        self._cut = f"the link between {link[0]} and {link[1]} was cut at {self.scheduler.now_s:.6g} s"
        self.scheduler.call_at(self.scheduler.now_s + detection_s, self._learn_of_cut)

    def _learn_of_cut(self) -> None:
        self._is_cut_known = True
        for operation in self._operations.values():
            if operation.done_s == math.inf:
                self._wake_all(operation)

    def _refuse_if_lost(self, number: int, operation: JoinedOperation) -> None:
        if self._is_cut_known:
            raise WorkerLostError(f"collective operation {number} cannot be completed: {self._cut}.")
        missing = sorted(set(self.lost) - operation.arrived)
        if missing:
            raise lost_in_collective(
                f"collective operation {number}", sorted(operation.arrived), {one: self.lost[one] for one in missing}
            )


@dataclass(eq=False)
class NetworkCollectives:
    """One worker's side; implements `Collectives`.

    Modelled: the completion time, from `CollectiveCosts`. Up to two operations run at a time, as in Gloo: the bytes of one
    travel while the rounds of the other wait for their latency. Computation between the start and `wait` overlaps. Other
    messages do not slow them. NCCL runs one at a time, with latencies that are negligible beside the bytes of a bucket.
    Without vectors (timing only) an operation has as many bytes as its vector stands for. Sums of half-precision types travel
    as float32: `widening` times the parameters' size, 2 for them and 1 otherwise. Reads and writes by the worker's own thread
    take time: weighting and dividing a mean, and adding up the result of a reduce-scatter. Pieces that are added up as they
    arrive are not charged: that overlaps with sending.

    Reference: PyTorch's `ProcessGroupGloo`, whose options give a group two threads per device.
    """

    state: NetworkCollectivesState
    costs: CollectiveCosts
    worker_id: int
    counts: Counts
    declared_bytes: int | None  # size of every vector if vectors are empty
    moved: Callable[..., None]  # waits while the worker moves vectors
    widening: int = 1
    waited_s: float = 0.0  # seconds spent waiting; the caller reads it and resets it to 0

    def __post_init__(self) -> None:
        self._number = 0
        self.members = range(self.state.num_workers)

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        if self.state.num_workers == 1:
            return list(numbers)
        totals = list(numbers)
        self.moved(2, of=vector)  # weighted before, and divided afterwards
        cost = self.costs.all_reduce(self._sum_bytes(vector))
        self._start((vector, weight, totals), mean_into_all, cost).wait()
        self.moved(2, of=vector)
        return totals

    def start_all_reduce(self, vector: torch.Tensor) -> NetworkHandle:
        return self._start(vector, sum_into_all, self.costs.all_reduce(self._sum_bytes(vector)))

    def start_reduce_scatter(self, vector: torch.Tensor, part: torch.Tensor) -> NetworkHandle:
        n = self.state.num_workers
        add_up = partial(self.moved, (3 * n - 1) / n, of=vector)  # the first piece copied, the others added
        return self._start((vector, part), sum_into_parts, self.costs.half(self._sum_bytes(vector)), add_up)

    def start_all_gather(self, part: torch.Tensor, vector: torch.Tensor) -> NetworkHandle:
        pieces = pieces_of(self.worker_id, self.state.num_workers, part, vector)
        return self._start(pieces, exchange_pieces, self.costs.half(self._bytes(vector)))

    def start_all_to_all(self, given: torch.Tensor, taken: torch.Tensor) -> NetworkHandle:
        pieces = pieces_of(self.worker_id, self.state.num_workers, given, taken)
        return self._start(pieces, exchange_pieces, self.costs.half(self._bytes(given)))

    def _bytes(self, vector: torch.Tensor) -> int:
        if vector.numel() or self.declared_bytes is None:
            return vector.numel() * vector.element_size()
        own_bytes = getattr(vector, "num_bytes", None)
        num_bytes = self.declared_bytes if own_bytes is None else own_bytes
        return round(num_bytes * getattr(vector, "share", 1.0))

    def _sum_bytes(self, vector: torch.Tensor) -> int:
        if vector.numel() or self.declared_bytes is None:
            return vector.numel() * sum_type(vector.dtype).itemsize
        return self._bytes(vector) * self.widening

    def _start(
        self, given: Any, finish: Callable[[list[Any]], None], cost: Cost, then: Callable[[], None] | None = None
    ) -> NetworkHandle:
        self.state.scheduler.catch_up()
        self._number += 1
        self.counts.messages += cost.messages
        self.counts.sent_bytes += round(cost.sent_bytes)
        self.state.join(self._number, self.worker_id, given, finish, cost)
        return NetworkHandle(self, self._number, then, cost.time_s)


@dataclass(eq=False, slots=True)
class NetworkHandle:
    """An operation in progress; implements `Handle`."""

    owner: NetworkCollectives
    number: int
    then: Callable[[], None] | None
    travel_s: float

    def wait(self) -> Sequence[int]:
        owner, state = self.owner, self.owner.state
        begun_s = state.scheduler.time_s()
        state.wait(self.number)
        waited_s = state.scheduler.time_s() - begun_s
        owner.waited_s += waited_s
        if (peer := owner.costs.behind_slowest.get(owner.worker_id)) is not None:
            owner.counts.note_partner(peer, min(waited_s, self.travel_s))
        if self.then is not None:
            self.then()
        return owner.members
