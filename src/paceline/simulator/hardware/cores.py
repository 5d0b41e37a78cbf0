"""Fewer cores than programs, in virtual time: round-robin scheduling with time slices."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Self

from greenlet import GreenletExit

from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.core import COPY_VECTORS, Core
from paceline.simulator.scheduler import Event, Scheduler


@dataclass(eq=False, slots=True)
class _Turn:
    """A computation on a core or in the queue; `Cores._done` counts when it began its slice, and when it ends."""

    then: Event  # after its computation
    left_s: float  # while it waits for a core
    begun: float = 0.0
    ends: float = math.inf
    number: int = 0  # of computations without releasing the core


@dataclass(frozen=True, kw_only=True)
class Cold:
    """The cost of resuming after time away from the cores; see the fields of `Cluster`."""

    cold_s: float = 0.0
    cold_factor: float = 2.0
    cooling_s: float = 0.003


@dataclass(eq=False, slots=True)
class _Warmth:
    """A program's state: when it left its core, and how much longer its computing will take because of that."""

    left_s: float | None = None  # None: it has a core, or waits for one
    owed_s: float = 0.0

    def longer_s(self, now_s: float, alone_s: float, cold: Cold) -> float:
        """How much longer than `alone_s` the computation takes that begins now."""
        if self.left_s is not None:
            kept = math.exp((self.left_s - now_s) / cold.cooling_s)
            self.owed_s = cold.cold_s - (cold.cold_s - self.owed_s) * kept
            self.left_s = None
        longer_s = min(self.owed_s, alone_s * (cold.cold_factor - 1.0))
        self.owed_s -= longer_s
        return longer_s


class Cores:
    """A number of cores, and a queue for them.

    A program whose slice is over goes to the end of the queue if others wait there. One that has computed, and continues to
    compute at the same instant, keeps its core and the rest of its slice: to a kernel, a worker's steps are one computation.
    After a sleep or a wait, a program first computes more slowly.

    Costs: O(number of cores) for each computation and each slice.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        number: int,
        slice_s: float,  # how long a program computes while others wait
        crowding: float = 1.0,  # factor on compute time while all cores compute; with fewer of them, in proportion
        cold: Cold | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._number = number
        self._slice_s = slice_s
        more = (crowding - 1.0) / max(1, number - 1)
        self._rates = [1.0, *(1.0 / (1.0 + more * others) for others in range(number))]  # by the number that compute
        self._running: dict[Event, _Turn] = {}
        self._line: deque[_Turn] = deque()
        self._done = 0.0  # seconds of computing that each core has done since all were idle
        self._done_at_s = 0.0
        self._plan_number = 0  # of the current planned event
        self._cold = cold if cold is not None and cold.cold_s > 0 else None
        self._warmths: dict[Event, _Warmth] = {}  # of programs that compute; handlers in between leave no trace

    @classmethod
    def of(cls, cluster: Cluster, scheduler: Scheduler) -> Self:
        assert cluster.cores is not None
        cold = Cold(cold_s=cluster.cold_s, cold_factor=cluster.cold_factor, cooling_s=cluster.cooling_s)
        return cls(scheduler, cluster.cores, cluster.slice_s, cluster.crowding, cold)

    def compute(self, alone_s: float) -> None:
        """Waits while the calling program computes; it takes `alone_s` if all other cores are idle."""
        if alone_s > 0:
            program = self._scheduler.current
            if self._cold is not None:
                warmth = self._warmths.setdefault(program, _Warmth())
                alone_s += warmth.longer_s(self._scheduler.now_s, alone_s, self._cold)
            self.start(program, alone_s)
            try:
                self._scheduler.wait("a core")
            except GreenletExit:  # killed: frees its core, or its place in the queue, at once
                self._give_up(program)
                raise

    def start(self, then: Event, alone_s: float) -> None:
        """Schedules an event after a computation of `alone_s`."""
        self._advance()
        turn = self._running.get(then)
        if turn is not None:  # it keeps its core
            turn.number += 1
            turn.ends = self._done + alone_s
        else:
            turn = _Turn(then, alone_s)
            if len(self._running) < self._number:
                self._begin(turn)
            else:
                self._line.append(turn)
        self._plan()

    def _give_up(self, then: Event) -> None:
        """Cancels a computation that runs or waits for a core."""
        self._advance()
        turn = self._running.pop(then, None)
        if turn is None:
            self._line = deque(one for one in self._line if one.then is not then)
            return
        turn.number += 1  # it leaves now, and not once more if it has just computed
        if self._line:
            self._begin(self._line.popleft())
        self._plan()

    def _begin(self, turn: _Turn) -> None:
        turn.begun = self._done
        turn.ends = self._done + turn.left_s
        self._running[turn.then] = turn

    def _advance(self) -> None:
        now_s = self._scheduler.now_s
        if self._running:
            self._done += (now_s - self._done_at_s) * self._rates[len(self._running)]
        else:
            self._done = 0.0
        self._done_at_s = now_s

    def _plan(self) -> None:
        """Plans the next event: a computation ends, or a slice is over while others wait."""
        self._plan_number += 1
        turns = self._running.values()
        reached = min((turn.ends for turn in turns), default=math.inf)
        if self._line:
            reached = min(reached, min(turn.begun for turn in turns) + self._slice_s)
        if reached == math.inf:
            return
        plan_number = self._plan_number

        def happen() -> None:
            if plan_number == self._plan_number:  # otherwise another program came or went meanwhile
                self._happen(max(reached, self._done))

        in_s = max(0.0, reached - self._done) / self._rates[len(turns)]
        self._scheduler.call_at(self._scheduler.now_s + in_s, happen)

    def _happen(self, reached: float) -> None:
        self._done, self._done_at_s = reached, self._scheduler.now_s  # exactly, so that rounding errors do not add up
        for turn in list(self._running.values()):
            if turn.ends <= self._done:
                turn.ends = math.inf
                self._scheduler.call_at(self._scheduler.now_s, turn.then)
                # And after it, at the same instant, which it may use to go on computing:
                number = turn.number
                self._scheduler.call_at(
                    self._scheduler.now_s, lambda turn=turn, number=number: self._leave(turn, number)
                )
            elif self._line and turn.begun + self._slice_s <= self._done:
                turn.left_s = turn.ends - self._done
                del self._running[turn.then]
                self._line.append(turn)
                self._begin(self._line.popleft())
        self._plan()

    def _leave(self, turn: _Turn, number: int) -> None:
        if turn.number != number:
            return
        self._advance()
        del self._running[turn.then]
        if turn.then in self._warmths:
            self._warmths[turn.then].left_s = self._scheduler.now_s
        if self._line:
            self._begin(self._line.popleft())
        self._plan()


class SharedCore(Core):
    """One worker's, or one server's, share of cores that all of them share.

    Moving vectors needs a core, like computing; `crowding` covers the memory bus as well. A vector that others write is in
    their caches when it is needed: a worker that computes on it in place, or updates it, reads it once more than alone.
    """

    __slots__ = ("_cores", "_fetched_vectors")

    def __init__(self, *, cores: Cores, fetched_vectors: float = 0.0, **named: Any) -> None:
        super().__init__(**named)
        self._cores = cores
        self._fetched_vectors = fetched_vectors  # 1 if others write the vector that is computed on, otherwise 0

    def occupy(self, duration_s: float, share: float) -> None:
        self._cores.compute(duration_s + self._fetched_vectors * self.vector_bytes / self.cluster.core_bytes_per_s)

    def copy(self, parts: int = 1) -> None:
        self._move(COPY_VECTORS / parts)

    def update(self, parts: int = 1) -> None:
        self._move((self.cluster.update_vectors + self._fetched_vectors) / parts)

    def atomic(self) -> None:
        self._cores.compute(self.cluster.atomic_s)

    def _move(self, num_vectors: float) -> None:
        self._cores.compute(num_vectors * self.vector_bytes / self.cluster.core_bytes_per_s)
