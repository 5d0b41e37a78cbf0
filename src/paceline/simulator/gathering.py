"""Meeting points of all simulated workers, with values and at the end; only the wait for the last takes virtual time."""

from __future__ import annotations

from typing import Any

from paceline.simulator.scheduler import Program, Scheduler

__all__ = ["EndBarrier", "SimulatedGathering"]


class SimulatedGathering:
    """The values that the workers have brought."""

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self._scheduler = scheduler
        self._here = set(range(num_workers))
        self._parts: dict[int, Any] = {}
        self._waiting: list[Program] = []
        self._answers: dict[int, list[Any]] = {}

    def gather(self, worker_id: int, value: Any) -> list[Any]:
        """The values of all workers that are still in their loops, in worker order."""
        self._scheduler.catch_up()
        self._parts[worker_id] = value
        self._waiting.append(self._scheduler.current)
        if self._is_complete:
            self._settle()
        self._scheduler.wait("all workers to attach, or to call worker.sum or worker.mean")
        return self._answers.pop(worker_id)

    def leave(self, worker_id: int) -> None:
        self._here.discard(worker_id)
        self._parts.pop(worker_id, None)
        if self._parts and self._is_complete:
            self._settle()

    @property
    def _is_complete(self) -> bool:
        return self._here <= self._parts.keys()

    def _settle(self) -> None:
        answer = [value for _, value in sorted(self._parts.items())]
        # Until each has resumed: the first may come again before the last.
        self._answers |= dict.fromkeys(self._parts, answer)
        self._parts = {}
        for program in self._waiting:
            self._scheduler.wake(program)
        self._waiting = []


class EndBarrier:
    """Blocks workers until none of them trains any more; takes no virtual time of its own."""

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self._scheduler = scheduler
        self._training = set(range(num_workers))
        self._waiting: list[Program] = []

    def wait(self, worker_id: int) -> None:
        """This worker has stopped training; returns once all have."""
        self._scheduler.catch_up()
        self.leave(worker_id)
        if self._training:
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait("all workers to end")

    def leave(self, worker_id: int) -> None:
        """This worker has stopped training, and may have been killed."""
        self._training.discard(worker_id)
        if not self._training:
            for program in self._waiting:
                self._scheduler.wake(program)
            self._waiting.clear()
