"""The end of a simulated run: workers that have ended wait for those that still train."""

from __future__ import annotations

from paceline.simulator.scheduler import Program, Scheduler

__all__ = ["Ending"]


class Ending:
    """Where workers wait until none of them trains any more; costs no virtual time of its own.

    Args:
        scheduler: of the programs.
        num_workers: of the run.
    """

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self._scheduler = scheduler
        self._training = set(range(num_workers))
        self._waiting: list[Program] = []

    def wait(self, worker_id: int) -> None:
        """This worker trains no more; returns when that is so of all."""
        self._scheduler.catch_up()
        self.leave(worker_id)
        if self._training:
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait("all workers to end")

    def leave(self, worker_id: int) -> None:
        """This worker trains no more, and may have been killed."""
        self._training.discard(worker_id)
        if not self._training:
            for program in self._waiting:
                self._scheduler.wake(program)
            self._waiting.clear()
