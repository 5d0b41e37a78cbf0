"""Gives simulated workers that exchange models in rounds the members, and the models, that they had in a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from paceline.ports.ports import Message, Received
from paceline.ports.views import LOST
from paceline.records.order import NONE
from paceline.run.recorded_views import Deaths, RecordedNewcomers
from paceline.run.view_changes import Process, ViewChanges
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class RecordedRounds:
    """Implements `Views` for the worker whose program runs: who takes part in a round is recorded."""

    def __init__(
        self, scheduler: Scheduler, deaths: Deaths, changes: ViewChanges, newcomers: RecordedNewcomers, num_workers: int
    ) -> None:
        self._scheduler, self._deaths, self._changes, self._newcomers = scheduler, deaths, changes, newcomers
        self._members: list[Sequence[int]] = [range(num_workers)] * num_workers  # as each worker knows them
        self._incarnations = [0] * num_workers  # of the members
        self._rounds = [-1] * num_workers  # the last that each has begun
        self._begun, self._sent, self._last_came = ([0] * num_workers for _ in range(3))
        self._waiting: list[Program] = []

    @property
    def _me(self) -> int:
        return self._scheduler.current.worker_id

    @property
    def members(self) -> Sequence[int]:
        return self._members[self._me]

    def _process(self, worker: int) -> Process:
        return worker, self._incarnations[worker]

    def _tell(self, first_not_begun: int) -> None:
        """Begins all rounds before this one, or dies."""
        me = self._me
        if first_not_begun > self._changes.left_at(self._process(me)):
            self._deaths.die(me)
        self._begun[me] = max(self._begun[me], first_not_begun)
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()

    def begin(self, round: int) -> Sequence[int]:
        self._tell(round + 1)
        self._rounds[self._me] = round
        known = self._changes.left
        gone = {
            one for one in self.members if round >= known.get(self._process(one), {}).get("first_without", round + 1)
        }
        self._members[self._me] = tuple(one for one in self.members if one not in gone)
        return self.members

    def sent(self, batches: int) -> None:
        self._sent[self._me] = batches

    def got(self, worker: int, batches: int) -> None:
        self._sent[worker] = batches

    def kept(self, worker: int) -> int:
        left = self._changes.left.get(self._process(worker))
        return self._sent[worker] if left is None else left["kept"]

    def has_died(self, worker: int) -> bool:
        return True  # asked only about workers that have

    def living(self) -> Sequence[int]:
        me = self._me
        number = self._rounds[me] + 2
        self._tell(number)
        come = [one for one in self.members if self._changes.left_at(self._process(one)) >= number]
        while any(self._begun[one] < number for one in come):
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait("the others between two rounds")
        self._members[me] = tuple(come)
        return come

    def announce(self, newcomers: Mapping[int, int]) -> None:
        """Does nothing: when newcomers come is recorded."""

    def coming(self, round: int) -> Mapping[int, int]:
        before, came = self._last_came[self._me], self._changes.came
        found = {worker: n for (worker, n), at in came.items() if before < at <= round}
        self._last_came[self._me] = max([before, *(came[process] for process in found.items())])
        self._newcomers.wait_for(found)
        return found

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        me = self._me
        self._members[me] = tuple(sorted({*self.members, *newcomers}))
        for worker, incarnation in newcomers.items():
            self._incarnations[worker] = incarnation
        return {"members": self.members, "round": self._rounds[me], "last_came": self._last_came[me]}

    def enter(self, given: dict[str, Any]) -> None:
        me = self._me
        self._members[me], self._rounds[me], self._last_came[me] = given["members"], given["round"], given["last_came"]


class Models:
    """The models that workers send each other."""

    def __init__(self, scheduler: Scheduler, changes: ViewChanges) -> None:
        self._scheduler, self._changes = scheduler, changes
        self._models: dict[tuple[int, int, int], Message] = {}  # by sender, reader and round
        self._waiting: dict[tuple[int, int, int], Program] = {}

    def send(self, sender: int, reader: int, message: Message) -> None:
        key = sender, reader, message.number
        assert message.x is not None
        self._models[key] = message._replace(x=message.x.clone())
        if (program := self._waiting.pop(key, None)) is not None:
            self._scheduler.wake(program)

    def receive(self, sender: int, reader: int, round: int) -> Message:
        key = sender, reader, round
        if key not in self._models and self._is_gone(sender, round):
            return Message(LOST, round)
        while key not in self._models:
            self._waiting[key] = self._scheduler.current
            self._scheduler.wait(f"the model of worker {sender} in round {round}")
        return self._models.pop(key)

    def _is_gone(self, sender: int, round: int) -> bool:
        """Whether the worker, which takes part in the round, had died before it began it."""
        came = [(at, n) for (worker, n), at in self._changes.came.items() if worker == sender and at <= round]
        process = sender, max(came, default=(0, 0))[1]
        return round >= self._changes.left_at(process)


class RecordedMailbox:
    """Implements `Mailbox` for a worker that exchanges models in rounds."""

    waited_s = 0.0

    def __init__(
        self,
        models: Models,
        worker: int,
        num_workers: int,
        lost: Set[tuple[int, int]],  # senders and rounds of the models that did not come
    ) -> None:
        self._models, self._worker, self._num_workers, self._lost = models, worker, num_workers, lost

    def send(self, to: int, message: Message) -> None:
        self._models.send(self._worker, to, message)

    def receive(self, timeout_s: float | None = None, *, kind: Any = None, sender: int, number: int) -> Received:
        is_lost = (sender, number) in self._lost
        message = Message(LOST, number) if is_lost else self._models.receive(sender, self._worker, number)
        return Received(sender, 0, message)

    def peers(self) -> Set[int]:
        return frozenset(range(self._num_workers)) - {self._worker}


def lost_models(order: Any) -> set[tuple[int, int]]:
    """Senders and rounds of the models that did not come to a worker, from the rows of its order."""
    rows = order[order["of"] == NONE]
    return set(zip(rows["peer"].tolist(), rows["moment"].tolist(), strict=True))
