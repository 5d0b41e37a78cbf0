"""Which workers take part in rounds of neighbours' messages, among workers that have no supervisor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch

from paceline.ports.ports import NO_NUMBERS, Event, Filter, Mailbox, Message, Received
from paceline.ports.started import Operation
from paceline.ports.views import LOST, MODEL
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.round_header import Purpose, RoundHeader

_OF_MEMBERS = ("_begun", "_known", "_kept", "_first_without", "_comes")  # what newcomers get


class _Heard(NamedTuple):
    """The newest model that has come from a worker."""

    rounds: int = 0  # its round, plus 1; 0: none has come
    batches: int = 0  # the rounds of batches whose steps it contains


class _Report(NamedTuple):
    """What a worker says at a meeting."""

    begun: int  # the first round of messages that it has not begun
    place: int  # 0: in such a round; else where it waits for all, as `Purpose` plus 1
    announced: list[int]  # of each worker, the incarnation that is to come in its place; 0: none
    heard: list[_Heard]  # of each worker

    @classmethod
    def of(cls, numbers: Sequence[int]) -> _Report:
        """The inverse of `numbers`."""
        begun, place, *rest = numbers
        announced, heard = rest[: len(rest) // 3], rest[len(rest) // 3 :]
        return cls(begun, place, announced, [_Heard(*one) for one in zip(heard[::2], heard[1::2], strict=True)])

    def numbers(self) -> list[int]:
        return [self.begun, self.place, *self.announced, *(number for one in self.heard for number in one)]


class MessageViews(MessageCollectives):
    """Implements `Views`, and the mailbox of a program that sends models to its neighbours in rounds.

    Workers can be in different rounds when one dies. The survivors then meet: in a round of `MessageCollectives`, each says
    which round it has begun, and which models it has from each worker. All get the same reports of the same members. The
    first round without the dead worker is the one after the newest that any report names.

    A worker meets the others as soon as it knows of a death, a departure or a connection that broke and was restored, and as
    soon as another one says so, also while it waits for a neighbour's model. An operation for which all must come, such as
    `living` or a sum, begins with meetings, too, until all report that they have come. Workers that are still in a round go to
    such a meeting only when they get there.

    The first member announces newcomers at a meeting for which it calls the others. They come before the round that would be
    the first one without a dead worker. Before that round, all wait for each other, and let the newcomers in.

    This is safe:

    - All that end a meeting have the same reports, so they agree on the first round without a dead worker, and on its steps.
    - A worker begins no round between its report and the meeting's end. The rounds that it had begun before are in its report.
      So a dead worker is a member of a round for all survivors, or for none.
    - A worker has sent its models of all rounds that its report calls begun. Messages of one sender keep their order, and a
      meeting ends only after a message from every member. So by its end such a model has come, or was lost with a connection.
    - Models of a dead worker that come after the report are dropped, because the report does not count their steps.

    Costs: nothing in a round; after a death, for newcomers, and before each operation of all, a round of
    `MessageCollectives` with 2 + 3 n numbers from each of n workers.

    Args:
        mailbox, worker_id, num_workers, options: as for `MessageCollectives`.
    """

    def __init__(self, mailbox: Mailbox, worker_id: int, num_workers: int, **options: Any) -> None:
        self._models = _Models(mailbox, num_workers)
        super().__init__(self._models, worker_id, num_workers, **options)
        self._begun = self._batches = 0
        self._known: Sequence[int] = self.members  # of the last meeting
        self._first_without: dict[int, int] = {}  # by worker that is gone
        self._announces = self._nobody = [0] * num_workers  # as in a report
        self._coming: dict[int, int] = {}  # newcomers that were announced
        self._comes = 0  # the round before which they come
        self._kept = [0] * num_workers

    # Views

    def begin(self, round: int) -> Sequence[int]:
        self._begun = round + 1
        return tuple(one for one in range(self._num_workers) if round < self._first_without.get(one, round + 1))

    def sent(self, batches: int) -> None:
        self._batches = batches

    def got(self, worker: int, batches: int) -> None:
        self._models.heard[worker] = _Heard(self._begun, batches)

    def kept(self, worker: int) -> int:
        """As in `Survivors`: of other workers, as the last meeting found."""
        return self._batches if worker == self._worker_id else self._kept[worker]

    def has_died(self, worker: int) -> bool:
        return worker in self._first_without

    # Newcomers

    def announce(self, newcomers: Mapping[int, int]) -> None:
        if not self._coming:
            self._announces = [newcomers.get(one, 0) for one in range(self._num_workers)]
            self._next.call()
            self._meet()

    def coming(self, round: int) -> Mapping[int, int]:
        if round < self._comes:
            return {}
        newcomers, self._coming = self._coming, {}
        return newcomers

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        given = super().let_in(newcomers)
        for worker in newcomers:
            self._first_without.pop(worker, None)
            self._models.open(worker, self._begun)
        self._known = tuple(sorted({*self._known, *newcomers}))
        return given | {name: getattr(self, name) for name in _OF_MEMBERS}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next `living` on, with what `let_in` returned to a member."""
        super().enter(given)
        vars(self).update({name: given[name] for name in _OF_MEMBERS})
        for worker in range(self._num_workers):
            self._models.open(worker, self._begun)
        for worker in self._first_without:
            self._models.close(worker, 0)

    # The program's mailbox

    def send(self, to: int, message: Message) -> None:
        """As in `Mailbox`; if a worker cannot be reached, its event is on the way."""
        self._send(to, message)

    def receive(self, timeout_s: float, *, kind: object, sender: int, number: int) -> Event | None:
        """The model that a neighbour had in a round, or LOST instead; None once `timeout_s` have passed since a meeting."""
        until_s, waited_s = self._now_s() + timeout_s, 0.0
        while (found := self._models.take(sender, number)) is None and self._now_s() < until_s:
            if self._is_called(sender):
                self._meet()
                until_s = self._now_s() + timeout_s
            else:
                began_s = self._now_s()
                self._hear()
                waited_s += self._now_s() - began_s
        self.waited_s += waited_s
        if self.counts is not None and waited_s:
            self.counts.note_partner(sender, waited_s)
        return found

    # Operations of all

    def living(self) -> Sequence[int]:
        self._come_together()
        return self.members

    def all_reduce_mean(
        self, vector: torch.Tensor, weight: float, numbers: Sequence[float] = NO_NUMBERS
    ) -> list[float]:
        self._come_together()
        return super().all_reduce_mean(vector, weight, numbers)

    def _carry_out(self, operations: list[Operation]) -> None:
        self._come_together()
        super()._carry_out(operations)

    def add_up(self, vector: torch.Tensor) -> None:
        self._come_together()
        super().add_up(vector)

    def _come_together(self) -> None:
        """Waits until all living workers have come to this place."""
        while not all(report.place for report in self._meet(1 + self.purpose).values()):
            pass

    # Meetings

    def _is_called(self, sender: int) -> bool:
        """Whether another worker is or must be at a meeting that needs this one, which waits for a model of `sender`."""
        return (
            self._next.changes
            or self._next.ids != self._known  # an operation of all has shown that a member is gone
            or any(round > self._round and one == sender for round, _, _, one in self._received)
        )

    def _meet(self, place: int = 0) -> Mapping[int, _Report]:
        own = _Report(self._begun, place, self._announces, list(self._models.heard))
        table = torch.zeros(self._num_workers, len(own.numbers()), dtype=torch.int64)
        table[self._worker_id] = torch.tensor(own.numbers())
        purpose, self.purpose = self.purpose, Purpose.STEP
        super().add_up(table.view(-1))
        self.purpose = purpose
        reports = {one: _Report.of(table[one].tolist()) for one in self.members}
        self._check(reports)
        first_without = max(max(one.begun, *(heard.rounds for heard in one.heard)) for one in reports.values())
        for worker in set(self._known).difference(self.members):
            self._first_without[worker] = first_without
            self._models.close(worker, own.heard[worker].rounds)
        for worker in self._known:
            self._kept[worker] = max(self._kept[worker], *(one.heard[worker].batches for one in reports.values()))
        announced = {one: n for report in reports.values() for one, n in enumerate(report.announced) if n}
        if announced:
            self._coming, self._comes, self._announces = announced, first_without, self._nobody
        for worker, report in reports.items():
            self._models.first_due[worker] = report.begun
        self._known = self.members
        return reports

    def _check(self, reports: Mapping[int, _Report]) -> None:
        """Raises an error if a worker waits for all where another one cannot come."""
        newest = max(reports, key=lambda one: reports[one].begun)
        for one, report in reports.items():
            for other in (newest, self._worker_id):
                told = reports[other]
                if report.place and (told.begun > report.begun or told.place not in (0, report.place)):
                    own = RoundHeader(purpose=Purpose(max(0, told.place - 1)))
                    why = RoundHeader(purpose=Purpose(report.place - 1)).why_unlike(own, other)
                    raise self._lost([one], why or f"has made fewer steps than worker {other}")

    @property
    def _named_round(self) -> int:
        return self._begun


class _Models:
    """A mailbox that keeps the models that come, and hands on all other messages and events."""

    def __init__(self, mailbox: Mailbox, num_workers: int) -> None:
        self._mailbox = mailbox
        self.send, self.peers = mailbox.send, mailbox.peers
        self.heard = [_Heard()] * num_workers  # of each worker, the newest model that has come
        # Of each worker: earlier rounds' models that have not come are lost.
        self.first_due: list[float] = [0] * num_workers
        self._received: dict[tuple[int, int], Received] = {}  # by sender and round

    def receive(self, timeout_s: float | None = None, **wanted: Unpack[Filter]) -> Event | None:
        """As in `Mailbox`; also returns None when a model has come."""
        event = self._mailbox.receive(timeout_s, kind=(*(wanted.get("kind") or ()), MODEL))
        if not isinstance(event, Received) or event.message.kind != MODEL:
            return event
        one, round = event.sender, event.message.number
        if round >= self.first_due[one]:
            self._received[one, round] = event
            self.heard[one] = max(self.heard[one], _Heard(round + 1, event.message.version))
        return None

    def take(self, sender: int, round: int) -> Received | None:
        """The model that a worker had in a round, or LOST instead; None: it can still come."""
        if round < self.first_due[sender] and (sender, round) not in self._received:
            return Received(sender, 0, Message(LOST, round))
        return self._received.pop((sender, round), None)

    def open(self, worker: int, round: int) -> None:
        """Of a newcomer, or to one, there are models from this round on."""
        self.close(worker, 0)
        self.heard[worker], self.first_due[worker] = _Heard(), round

    def close(self, worker: int, rounds: int) -> None:
        """Of a worker that is gone, only the models of the first `rounds` are used."""
        self.first_due[worker] = math.inf
        for key in [key for key in self._received if key[0] == worker and key[1] >= rounds]:
            del self._received[key]
