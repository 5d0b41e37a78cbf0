"""Admission with a warm start: one worker trains alone first, and the others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.algorithms.server.admission import Admission

__all__ = ["WarmStart"]


class WarmStart(Admission):
    """Every gradient is applied as it arrives; but until so many updates are made, one worker only may read.

    It is the one with the lowest id of those that take part, so where it dies or has no more data, the next one goes on.

    Args:
        num_updates: made by one worker alone.
        workers: those that take part from the beginning.
        version: the shard's number of updates so far; a successor's shard, and a resumed run's, goes on counting.
    """

    def __init__(self, num_updates: int, workers: Iterable[int], version: Callable[[], int]) -> None:
        self._num_updates = num_updates
        self._members = set(workers)
        self._version = version

    def join(self, worker_id: int, sequence: int = 0) -> None:
        self._members.add(worker_id)

    def leave(self, worker_id: int) -> None:
        self._members.discard(worker_id)

    def may_read(self, worker_id: int) -> bool:
        """Whether the warm start is over, or this is the worker that makes it."""
        return self._version() >= self._num_updates or worker_id <= min(self._members, default=worker_id)
