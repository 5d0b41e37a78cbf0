"""Replacements of dead workers on one simulated machine: how the others let them in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paceline.errors import NotReplacedError, RunStopped
from paceline.ports.newcomers import Refusal
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class _Request(NamedTuple):
    incarnation: int
    program: Program  # which waits
    epoch: int  # that its loop has reached; negative: it can go on in any


class SimulatedNewcomers:
    """Implements `Newcomers` for all workers of a machine."""

    def __init__(self, scheduler: Scheduler, min_workers: int, num_started: Callable[[], int]) -> None:
        self._scheduler, self.min_workers = scheduler, min_workers
        self._num_started, self._num_in_or_dead = num_started, 0
        self._asking: dict[int, _Request] = {}  # by worker
        self._accepted: dict[int, int] = {}  # worker -> incarnation that waits for the others, whatever their epoch
        self._inside: dict[int, int] = {}
        self._given: dict[int, dict[str, Any] | Refusal | None] = {}  # None: the others are in a later epoch
        self._newest = -1  # epoch

    def expected(self, waited_s: float) -> int:
        return self._num_started() - self._num_in_or_dead

    def accepted(self, epoch: int) -> dict[int, int]:
        for worker, (incarnation, _, at) in self._asking.items():
            if at < 0 or at == epoch:
                self._accepted[worker] = incarnation
        return {one: n for one, n in self._accepted.items() if self._inside.get(one, 0) < n}

    def begin_epoch(self, epoch: int) -> None:
        """Another worker begins an epoch: newcomers whose loops are in an earlier one go on to it, unless accepted."""
        self._newest = max(self._newest, epoch)
        for worker, (incarnation, _, at) in list(self._asking.items()):
            if 0 <= at < self._newest and self._accepted.get(worker) != incarnation:
                self._wake(worker, incarnation, None)

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        for worker, incarnation in newcomers.items():
            self._wake(worker, incarnation, why)

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        self._inside |= newcomers

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        for worker, incarnation in newcomers.items():
            self._wake(worker, incarnation, copy.deepcopy(state))

    def _wake(self, worker: int, incarnation: int, given: dict[str, Any] | Refusal | None) -> None:
        if worker in self._asking and self._asking[worker].incarnation == incarnation:  # else it has been killed
            self._given[worker] = given
            self._accepted.pop(worker, None)
            self._scheduler.wake(self._asking.pop(worker).program)

    def forget(self, worker: int, incarnation: int) -> None:
        """A worker was killed, perhaps before the others let it in."""
        self._num_in_or_dead += self._inside.get(worker, 0) < incarnation
        for known in (self._asking, self._accepted, self._given):
            known.pop(worker, None)

    def end_if_alone(self, num_left: int) -> bool:
        """Ends the newcomers that wait if all workers left are newcomers. Returns whether it did."""
        if not self._asking or len(self._asking) < num_left:
            return False
        for one in self._asking.values():
            self._scheduler.wake(one.program)
        self._asking.clear()
        self._accepted.clear()
        return True

    def enter(self, worker: int, incarnation: int, epoch: int = -1) -> dict[str, Any] | None:
        """Waits until the others let a newcomer in; returns what they give it. None: they are in a later epoch than it.

        Raises:
            NotReplacedError: they cannot let it in.
            RunStopped: they have ended.
        """
        if 0 <= epoch < self._newest:
            return None
        self._asking[worker] = _Request(incarnation, self._scheduler.current, epoch)
        self._scheduler.wait("the others to let it in")
        if worker not in self._given:
            raise RunStopped("the others have ended")
        if (given := self._given.pop(worker)) is None:
            return None
        if isinstance(given, Refusal):
            raise NotReplacedError(given.why)
        self._num_in_or_dead += 1
        return given
