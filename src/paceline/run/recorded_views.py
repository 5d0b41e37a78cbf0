"""Lets simulated workers in rounds have the members, deaths, replacements and models that they had in a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from paceline.ports.ports import Message, Received
from paceline.ports.views import LOST
from paceline.records.order import NONE, Process
from paceline.run.view_changes import ViewChanges
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.newcomers import SimulatedNewcomers
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler
from paceline.simulator.views import SimulatedViews


class RecordedMembers(SimulatedNewcomers):
    """Lets workers die, and their replacements in, at the same rounds as in the run.

    A replacement that died before it took part is let in, and removed at once.
    """

    def __init__(self, machine: SimulatedMachine, changes: ViewChanges, min_workers: int) -> None:
        super().__init__(machine.scheduler, min_workers, lambda: 0)
        self._machine, self._changes, self._rounds = machine, changes, machine.all_reduce
        self._asked = dict[int, int]()
        self._waiting: list[Program] = []  # until a newcomer has asked
        if self._rounds is not None:
            self._rounds.on_arrival = self._come

    def has_died(self, worker_id: int) -> bool:
        """Whether the worker's present process has died in the run."""
        return self._process(worker_id) in self._changes.left

    def _process(self, worker_id: int) -> Process:
        return worker_id, self._machine.lives.incarnations.get(worker_id, 0)

    def _come(self, worker_id: int) -> None:
        if self._rounds.num_barriers >= self._changes.left_at(self._process(worker_id)):
            self.die(worker_id)

    def gather(self, worker_id: int, num_sums: int) -> None:
        """A worker's loop brings a value for the others, after `num_sums` that they have got."""
        left = self._changes.left.get(self._process(worker_id))
        if left is not None and num_sums >= left["num_sums"]:
            self.die(worker_id)

    def die(self, worker_id: int) -> None:
        """Ends the worker whose program calls this."""
        self._scheduler.call_at(self._scheduler.now_s, partial(self._end, worker_id))
        self._scheduler.wait("its death")

    def _end(self, worker_id: int) -> None:
        lives, process = self._machine.lives, self._process(worker_id)
        self._leave_out(process)
        self._machine.shared.lose(worker_id)
        self._scheduler.end_worker(worker_id)
        lives.on_gone(worker_id)
        if (successor := self._changes.successor(process)) is not None:
            lives.start_again(worker_id, successor)

    def _leave_out(self, process: Process) -> None:
        """Barriers no longer wait for this worker."""
        if self._rounds is not None:
            self._rounds.lose(process[0], "", died=process[1])

    def expected(self, waited_s: float) -> int:
        """Enough, if any comes later in the run."""
        return self.min_workers * any(at > self._rounds.num_barriers for at in self._changes.came.values())

    def accepted(self, epoch: int) -> dict[int, int]:
        num_barriers = self._rounds.num_barriers if self._rounds is not None else -1  # neighbours know when they come
        came = sorted(self._changes.came.items())
        found = {worker: n for (worker, n), at in came if at <= num_barriers and self._inside.get(worker, 0) < n}
        self.wait_for(found)
        return found

    def wait_for(self, newcomers: Mapping[int, int]) -> None:
        """Waits until they have asked."""
        for worker, incarnation in newcomers.items():
            while self._changes.took_part((worker, incarnation)) and self._asked.get(worker) != incarnation:
                self._waiting.append(self._scheduler.current)
                self._scheduler.wait(f"the replacement of worker {worker}")

    def enter(self, worker: int, incarnation: int, epoch: int = -1) -> dict[str, Any] | None:
        """As of `SimulatedNewcomers`, in any epoch: what a replacement gets says in which one the others are."""
        self._asked[worker] = incarnation
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()
        return super().enter(worker, incarnation)

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        super().let_in(newcomers, giver)
        for process in newcomers.items():
            if not self._changes.took_part(process):
                self._scheduler.call_at(self._scheduler.now_s, partial(self._leave_out, process))


class RecordedRounds(SimulatedViews):
    """The members that each round had in the run, and the models that they sent each other: also implements `Mailbox`."""

    waited_s = 0.0

    def __init__(
        self,
        scheduler: Scheduler,
        changes: ViewChanges,
        members: RecordedMembers,
        num_workers: int,
        order: Mapping[int, np.ndarray],  # by worker: says which models did not come
    ) -> None:
        super().__init__(scheduler, num_workers)
        self._changes, self._recorded = changes, members
        self._incarnations = [0] * num_workers  # of the members
        self._models: dict[tuple[int, int, int], Message] = {}  # by sender, reader and round
        self._readers: dict[tuple[int, int, int], Program] = {}  # that wait for a model
        self._not_come = {
            (sender, reader, round)
            for reader, rows in order.items()
            for sender, round in rows[rows["of"] == NONE][["peer", "moment"]].tolist()
        }

    def _process(self, worker: int) -> Process:
        return worker, self._incarnations[worker]

    def _tell(self, first_not_begun: int) -> None:
        """Begins all rounds before this one, or dies."""
        if first_not_begun > self._changes.left_at(self._process(self._worker_id)):
            self._recorded.die(self._worker_id)
        super()._tell(first_not_begun)

    def _wake(self) -> None:
        for _, program in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()

    def begin(self, round: int) -> Sequence[int]:
        super().begin(round)
        left = {one: self._changes.left.get(self._process(one), {}) for one in self.members}
        self.members = tuple(one for one, how in left.items() if round < how.get("first_without", round + 1))
        return self.members

    def kept(self, worker: int) -> int:
        left = self._changes.left.get(self._process(worker))
        return super().kept(worker) if left is None else left["kept"]

    def has_died(self, worker: int) -> bool:
        return True  # asked only about workers that have

    def living(self) -> Sequence[int]:
        number = self._rounds[self._worker_id] + 2
        self._tell(number)
        come = [one for one in self.members if self._changes.left_at(self._process(one)) >= number]
        while any(self._begun[one] < number for one in come):
            self._waiting.append((number, self._scheduler.current))
            self._scheduler.wait("the others between two rounds")
        self.members = tuple(come)
        return come

    def coming(self, round: int) -> Mapping[int, int]:
        me, came = self._worker_id, self._changes.came
        found = {worker: n for (worker, n), at in came.items() if self._last_came[me] < at <= round}
        self._last_came[me] = max([self._last_came[me], *(came[process] for process in found.items())])
        self._recorded.wait_for(found)
        return found

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        for worker, incarnation in newcomers.items():
            self._incarnations[worker] = incarnation
        return {**super().let_in(newcomers), "last_came": self._last_came[self._worker_id]}

    def enter(self, given: dict[str, Any]) -> None:
        super().enter(given)
        self._last_came[self._worker_id] = given["last_came"]

    # The mailbox

    def send(self, to: int, message: Message) -> None:
        key = self._worker_id, to, message.number
        assert message.x is not None
        self._models[key] = message._replace(x=message.x.clone())
        if (program := self._readers.pop(key, None)) is not None:
            self._scheduler.wake(program)

    def receive(self, timeout_s: float | None = None, *, kind: Any = None, sender: int, number: int) -> Received:
        key = sender, self._worker_id, number
        if key in self._not_come or (key not in self._models and self._is_gone(sender, number)):
            return Received(sender, 0, Message(LOST, number))
        while key not in self._models:
            self._readers[key] = self._scheduler.current
            self._scheduler.wait(f"the model of worker {sender} in round {number}")
        return Received(sender, 0, self._models.pop(key))

    def _is_gone(self, sender: int, round: int) -> bool:
        """Whether the worker, which takes part in the round, had died before it began it."""
        came = [(at, n) for (worker, n), at in self._changes.came.items() if worker == sender and at <= round]
        process = sender, max(came, default=(0, 0))[1]
        return round >= self._changes.left_at(process)

    def peers(self) -> Set[int]:
        return frozenset(range(len(self._begun))) - {self._worker_id}
