"""Which workers of one simulated machine take part in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import WorkerLostError
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class SimulatedViews:
    """Implements `Views` for the worker whose program runs."""

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self._scheduler = scheduler
        self._members: list[Sequence[int]] = [range(num_workers)] * num_workers  # as each worker knows them
        self._rounds = [-1] * num_workers  # the last that each has begun
        self._begun = [0] * num_workers  # the first that each has not begun, or waits for at an epoch's end
        self._sent = [0] * num_workers
        self._first_without: dict[int, int] = {}  # by dead worker
        self._died = [-1] * num_workers  # the last incarnation of each that has died
        self._left: dict[int, str] = {}
        self._named: Mapping[int, int] = {}  # newcomers that come
        self._comes = 0  # before this round
        self._last_came = [0] * num_workers  # the round in which the last newcomers were to come, as each worker knows
        self._waiting: list[tuple[int, Program]] = []  # for all workers to begin so many rounds

    def begin(self, round: int) -> Sequence[int]:
        self._rounds[self._worker_id] = round
        self._tell(round + 1)
        if self._first_without:
            self.members = tuple(one for one in self.members if round < self._first_without.get(one, round + 1))
        return self.members

    @property
    def _worker_id(self) -> int:
        return self._scheduler.current.worker_id

    @property
    def members(self) -> Sequence[int]:
        return self._members[self._worker_id]

    @members.setter
    def members(self, members: Sequence[int]) -> None:
        self._members[self._worker_id] = members

    def _tell(self, first_not_begun: int) -> None:
        self._scheduler.catch_up()
        worker = self._worker_id
        self._begun[worker] = max(self._begun[worker], first_not_begun)
        self._wake()

    def sent(self, batches: int) -> None:
        self._sent[self._worker_id] = batches

    def got(self, worker: int, batches: int) -> None:
        self._sent[worker] = batches

    def kept(self, worker: int) -> int:
        return self._sent[worker]

    def has_died(self, worker: int) -> bool:
        return worker in self._first_without

    def living(self) -> Sequence[int]:
        number = self._rounds[self._worker_id] + 2
        self._tell(number)
        while not self._have_come(number, self._worker_id):
            self._waiting.append((number, self._scheduler.current))
            self._scheduler.wait("the others between two rounds")
        missing = [one for one in self._left if self._begun[one] < number]
        if missing:
            raise WorkerLostError(
                f"Worker {missing[0]} has left the run ({self._left[missing[0]]}); the others wait for it."
            )
        self.members = tuple(one for one in self.members if self._begun[one] >= number)
        return self.members

    def _have_come(self, number: int, worker: int) -> bool:
        gone = self._first_without.keys() | self._left.keys()
        return all(self._begun[one] >= number or one in gone for one in self._members[worker])

    def announce(self, newcomers: Mapping[int, int]) -> None:
        if self._comes <= self._last_came[self._worker_id]:
            self._named, self._comes = newcomers, max(self._begun) + 1

    def coming(self, round: int) -> Mapping[int, int]:
        if not self._last_came[self._worker_id] < self._comes <= round:
            return {}
        self._last_came[self._worker_id] = self._comes
        return self._named

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        for worker, incarnation in newcomers.items():
            if self._died[worker] < incarnation:  # else it has died since
                self._first_without.pop(worker, None)
        self.members = tuple(sorted({*self.members, *newcomers}))
        return {"members": self.members, "round": self._rounds[self._worker_id]}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next `living` on, with what `let_in` returned to a member."""
        worker = self._worker_id
        self.members, self._rounds[worker], self._last_came[worker] = given["members"], given["round"], self._comes

    def _wake(self) -> None:
        ready = [one for one in self._waiting if self._have_come(one[0], one[1].worker_id)]
        for one in ready:
            self._waiting.remove(one)
            self._scheduler.wake(one[1])

    def lose(self, worker: int, reason: str, *, died: int | None = None) -> None:
        """A worker takes part in no further round; the others go on without it if its incarnation `died` is dead."""
        if died is not None:
            self._died[worker] = died
            self._first_without.setdefault(worker, max(self._begun))
        else:
            self._left[worker] = reason
        self._wake()
