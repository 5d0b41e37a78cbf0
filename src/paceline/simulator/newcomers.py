"""Replacements of dead workers on one simulated machine: how the others let them in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import NotReplacedError
from paceline.ports.newcomers import Refusal
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class SimulatedNewcomers:
    """Implements `Newcomers` for all workers of a machine.

    Args:
        num_started: how many replacements there have been.
    """

    def __init__(self, scheduler: Scheduler, min_workers: int, num_started: Callable[[], int]) -> None:
        self._scheduler, self.min_workers = scheduler, min_workers
        self._num_started, self._num_in_or_dead = num_started, 0
        self._asking: dict[int, tuple[int, Program]] = {}  # by worker: its incarnation, and the program that waits
        self._inside: dict[int, int] = {}
        self._given: dict[int, dict[str, Any] | Refusal] = {}

    def expected(self, waited_s: float) -> int:
        return self._num_started() - self._num_in_or_dead

    def accepted(self, epoch: int) -> dict[int, int]:
        """As in `Newcomers`; a task goes on in any epoch."""
        return {one: n for one, (n, _) in self._asking.items() if self._inside.get(one, 0) < n}

    def refuse(self, newcomers: Mapping[int, int], why: Refusal) -> None:
        for worker, incarnation in newcomers.items():
            self._wake(worker, incarnation, why)

    def let_in(self, newcomers: Mapping[int, int], giver: int) -> None:
        self._inside |= newcomers

    def give(self, newcomers: Mapping[int, int], state: dict[str, Any]) -> None:
        for worker, incarnation in newcomers.items():
            self._wake(worker, incarnation, copy.deepcopy(state))

    def _wake(self, worker: int, incarnation: int, given: dict[str, Any] | Refusal) -> None:
        if worker in self._asking and self._asking[worker][0] == incarnation:  # else it has been killed
            self._given[worker] = given
            self._scheduler.wake(self._asking.pop(worker)[1])

    def forget(self, worker: int) -> None:
        """A worker was killed, perhaps while it waited."""
        self._asking.pop(worker, None)

    def end_if_alone(self, num_left: int) -> bool:
        """Ends the newcomers that wait if all workers left are newcomers. Returns whether it did."""
        if not self._asking or len(self._asking) < num_left:
            return False
        for _, program in self._asking.values():
            self._scheduler.wake(program)
        self._asking.clear()
        return True

    def enter(self, worker: int, incarnation: int) -> dict[str, Any] | None:
        """Waits until the others let a newcomer in; returns what they give it. None: they have ended.

        Raises:
            NotReplacedError: they cannot let it in.
        """
        self._asking[worker] = incarnation, self._scheduler.current
        try:
            self._scheduler.wait("the others to let it in")
        finally:
            self._num_in_or_dead += 1
        given = self._given.pop(worker, None)
        if isinstance(given, Refusal):
            raise NotReplacedError(given.why)
        return given
