"""Meeting points of all simulated workers, with values; only the wait for the last takes virtual time."""

from __future__ import annotations

from typing import Any

from paceline.membership.common_calls import CommonCalls
from paceline.simulator.scheduler import Scheduler


class SimulatedGathering:
    """The values that the workers have brought."""

    def __init__(self, scheduler: Scheduler, num_workers: int, what: str) -> None:
        self._scheduler = scheduler
        self._what = what  # what a worker waits for, as an error says it
        self._calls = CommonCalls(range(num_workers))
        # Until each worker has resumed: the first may come again before the last.
        self._answers: dict[int, list[Any]] = {}

    def gather(self, worker_id: int, value: Any, epoch: int = 0) -> list[Any]:
        """The values of all workers that have not left, in worker order; `epoch`: that the worker's loop has reached."""
        self._scheduler.catch_up()
        self._calls.bring(worker_id, epoch, (self._scheduler.current, value))
        self._settle()
        self._scheduler.wait(self._what)
        return self._answers.pop(worker_id)

    def leave(self, worker_id: int) -> None:
        self._calls.leave(worker_id)
        self._settle()

    def come_back(self, worker_id: int, epoch: int) -> None:
        """The others wait for a dead worker's replacement, which has its first batch in this epoch."""
        self._calls.replace(worker_id)
        self._calls.enter(worker_id, epoch)

    def _settle(self) -> None:
        while parts := self._calls.take():
            values = [value for _, (_, value) in sorted(parts.items(), key=lambda part: part[0])]
            for worker_id, (program, _) in parts.items():
                self._answers[worker_id] = values
                self._scheduler.wake(program)
