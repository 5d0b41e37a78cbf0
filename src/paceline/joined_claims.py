"""Which batch is next, for workers that joined a run: with a counter that all share, and without."""

from __future__ import annotations

import contextlib

from paceline.meeting import Meeting, MeetingLostError
from paceline.transport.base import Mailbox

__all__ = ["JoinedClaims"]

_CLAIM_BATCHES = 4  # a trip to the join point takes as long as a small step; a claim of several shares it


class JoinedClaims:
    """Claims of the next batch number of all workers: from the counter at the join point, and without it by worker ids.

    When the join point is gone, every worker goes on behind the last number that it has seen claimed: number n is then worker
    n mod N's, and what belongs to a worker that cannot be reached is shared in the same way by those that can. So batches
    that others had claimed since then may be seen twice, at most a few for each worker; batches that a worker took along when
    it died are seen by nobody, as always; and around a later death, those may be missed that one worker left to another.

    Args:
        meeting: the join point.
        mailbox: says who can be reached.
        worker_id: this worker.
        num_workers: N.
        notes: takes a sentence when the join point is gone.

    Attributes:
        by_ids: whether batches are dealt out without the join point.
    """

    def __init__(self, meeting: Meeting, mailbox: Mailbox, worker_id: int, num_workers: int, notes: list[str]) -> None:
        self._meeting = meeting
        self._mailbox = mailbox
        self._worker_id, self._num_workers = worker_id, num_workers
        self._notes = notes
        self._numbers: list[int] = []
        self.by_ids = False  # the join point is of no use any more
        self._next = 0  # the first that this worker has not seen claimed
        with contextlib.suppress(MeetingLostError):
            self._next = max(0, meeting.add("next batch", 0))

    def __call__(self) -> int:
        """The next number."""
        if not self._numbers and not self.by_ids:
            try:
                begin = self._meeting.add("next batch", _CLAIM_BATCHES) - _CLAIM_BATCHES
                if begin < self._next:
                    raise MeetingLostError(self._meeting.address)  # its count went back, so it is of no use
                self._next = begin + _CLAIM_BATCHES
                self._numbers.extend(range(begin, self._next))
            except MeetingLostError:
                self.by_ids = True
                self._notes.append(
                    f"The join point is gone: batches from {self._next:,} on were dealt out by worker ids."
                )
        if self._numbers:
            return self._numbers.pop(0)
        while self._owner(self._next) != self._worker_id:
            self._next += 1
        self._next += 1
        return self._next - 1

    def _owner(self, number: int) -> int:
        owner = number % self._num_workers
        if owner == self._worker_id or owner in (there := self._mailbox.peers()):
            return owner
        alive = sorted({*there, self._worker_id})
        return alive[number // self._num_workers % len(alive)]
