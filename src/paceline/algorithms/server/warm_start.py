"""Admission with a warm start: one worker trains alone first while the others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.algorithms.server.admission import Admission

__all__ = ["WarmStart"]


class WarmStart(Admission):
    """Applies every gradient as it arrives; but for the first `num_updates` updates only one worker may read.

    That is the member with the lowest id, so if it dies or runs out of data, the next one takes over.

    Args:
        num_updates: made by one worker alone.
        workers: members at the start.
        version: the shard's number of updates so far; a successor, or a resumed run, continues the count.
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
        return self._version() >= self._num_updates or worker_id <= min(self._members, default=worker_id)
