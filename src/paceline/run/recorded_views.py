"""Lets simulated workers die, and their replacements come, where they did in a recorded run in rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.records.order import Process
from paceline.run.view_changes import ViewChanges
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.newcomers import SimulatedNewcomers
from paceline.simulator.program import Program


class Deaths:
    """Ends workers, and starts their replacements."""

    def __init__(self, machine: SimulatedMachine, changes: ViewChanges) -> None:
        self._machine, self._scheduler, self._changes = machine, machine.scheduler, changes
        if machine.all_reduce is not None:
            machine.all_reduce.on_arrival = self._come

    def has_died(self, worker_id: int) -> bool:
        """Whether the worker's present process has died in the run."""
        return self._process(worker_id) in self._changes.left

    def _process(self, worker_id: int) -> Process:
        return worker_id, self._machine.lives.incarnations.get(worker_id, 0)

    def _come(self, worker_id: int) -> None:
        if self._machine.all_reduce.num_barriers >= self._changes.left_at(self._process(worker_id)):
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
        self.leave_out(worker_id)
        self._machine.shared.lose(worker_id)
        self._scheduler.end_worker(worker_id)
        lives.on_gone(worker_id)
        if (successor := self._changes.successor(process)) is not None:
            lives.start_again(worker_id, successor)

    def leave_out(self, worker_id: int) -> None:
        """Barriers no longer wait for this worker."""
        if self._machine.all_reduce is not None:
            self._machine.all_reduce.lose(worker_id, "", is_dead=True)


class RecordedNewcomers(SimulatedNewcomers):
    """Lets replacements in at the same rounds as the run. One that died before it took part is let in, and removed at once."""

    def __init__(
        self,
        machine: SimulatedMachine,
        changes: ViewChanges,
        min_workers: int,
        leave_out: Callable[[int], None],  # lets the others go on without a worker
    ) -> None:
        super().__init__(machine.scheduler, min_workers, lambda: 0)
        self._rounds, self._changes, self._leave_out = machine.all_reduce, changes, leave_out
        self._asked = dict[int, int]()
        self._waiting: list[Program] = []  # until a newcomer has asked

    def expected(self, waited_s: float) -> int:
        """Enough, if any comes later in the run."""
        is_any = any(at > self._rounds.num_barriers for at in self._changes.came.values())
        return self.min_workers if is_any else 0

    def accepted(self, epoch: int) -> dict[int, int]:
        found = dict[int, int]()
        if self._rounds is not None:  # else all know when they come
            for (worker, incarnation), at in sorted(self._changes.came.items()):
                if at <= self._rounds.num_barriers and self._inside.get(worker, 0) < incarnation:
                    found[worker] = incarnation
        self.wait_for(found)
        return found

    def wait_for(self, newcomers: Mapping[int, int]) -> None:
        """Waits until they have asked."""
        for worker, incarnation in newcomers.items():
            while self._changes.took_part((worker, incarnation)) and self._asked.get(worker) != incarnation:
                self._waiting.append(self._scheduler.current)
                self._scheduler.wait(f"the replacement of worker {worker}")

    def enter(self, worker: int, incarnation: int) -> dict[str, Any] | None:
        self._asked[worker] = incarnation
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting.clear()
        return super().enter(worker, incarnation)

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        super().let_in(newcomers, giver)
        for process in newcomers.items():
            if not self._changes.took_part(process):
                self._scheduler.call_at(self._scheduler.now_s, partial(self._leave_out, process[0]))
