"""Meeting points of all simulated workers, with values; only the wait for the last takes virtual time."""

from __future__ import annotations

from typing import Any

from paceline.simulator.scheduler import Program, Scheduler


class SimulatedGathering:
    """The values that the workers have brought."""

    def __init__(self, scheduler: Scheduler, num_workers: int, what: str) -> None:
        self._scheduler = scheduler
        self._what = what  # what a worker waits for, as an error says it
        self._here = set(range(num_workers))
        self._parts: dict[int, Any] = {}
        self._waiting: list[Program] = []
        self._answers: dict[int, list[Any]] = {}

    def gather(self, worker_id: int, value: Any) -> list[Any]:
        """The values of all workers that have not left, in worker order."""
        self._scheduler.catch_up()
        self._parts[worker_id] = value
        self._waiting.append(self._scheduler.current)
        self._settle_if_complete()
        self._scheduler.wait(self._what)
        return self._answers.pop(worker_id)

    def leave(self, worker_id: int) -> None:
        self._here.discard(worker_id)
        self._parts.pop(worker_id, None)
        self._settle_if_complete()

    def come_back(self, worker_id: int) -> None:
        """The others wait for this worker again."""
        self._here.add(worker_id)

    def _settle_if_complete(self) -> None:
        if not self._parts or not self._here <= self._parts.keys():
            return
        answer = [value for _, value in sorted(self._parts.items())]
        # Until each has resumed: the first may come again before the last.
        self._answers |= dict.fromkeys(self._parts, answer)
        self._parts = {}
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting = []
