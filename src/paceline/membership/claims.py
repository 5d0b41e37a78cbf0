"""Batch claims of workers that joined a run: counted at the join point, or by worker ids once it is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from paceline.data.epoch_claims import CLAIM_BATCHES, EpochClaims, first_said
from paceline.membership.join_point import JoinPoint, JoinPointLostError
from paceline.ports.ports import Mailbox

_COUNTED_EPOCHS = 1 << 15  # the join point's store takes twice as many keys


class JoinedClaims(EpochClaims):
    """Implements `EpochClaims` with counts at the join point, or by worker ids if that is gone.

    Without the join point, every worker continues after the last batch that it has seen claimed: batch n of the epoch then
    belongs to worker n mod N, and the reachable workers share the batches of an unreachable one in the same way. A few
    batches per worker may be seen twice, because others had claimed them in the meantime. As always, a dying worker's claimed
    batches are lost; around a later death, workers may also skip a few batches that each left to another.
    """

    def __init__(
        self, join_point: JoinPoint, mailbox: Mailbox, worker_id: int, num_workers: int, notes: list[str]
    ) -> None:
        self._join_point = join_point
        self._mailbox = mailbox  # knows which workers can be reached
        self._worker_id, self._num_workers = worker_id, num_workers
        self._notes = notes  # gets a sentence when the join point is gone
        self.by_ids = False  # whether batches are dealt out by worker ids, without the join point
        self._epoch = 0
        self._places: list[int] = []
        self._next = 0  # the first batch of the epoch that this worker has not seen claimed

    def claim(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._next = epoch, 0
            self._places.clear()
        if not self._places and not self.by_ids and epoch < _COUNTED_EPOCHS:
            try:
                begin = self._join_point.add(f"next batch/{epoch}", CLAIM_BATCHES) - CLAIM_BATCHES
                if begin < self._next:
                    raise JoinPointLostError(self._join_point.address)  # its count went back, so it is of no use
                if not begin:
                    self._join_point.add("epochs begun", 1)
                self._next = begin + CLAIM_BATCHES
                self._places.extend(range(begin, self._next))
            except JoinPointLostError:
                self.by_ids = True
                self._notes.append(
                    f"The join point is gone: from batch {self._next:,} of epoch {epoch + 1:,} on, batches were dealt out by"
                    " worker ids."
                )
        if self._places:
            return self._places.pop(0)
        while self._owner(self._next) != self._worker_id:
            self._next += 1
        self._next += 1
        return self._next - 1

    def newest(self) -> int:
        with contextlib.suppress(JoinPointLostError):
            return max(0, self._join_point.add("epochs begun", 0) - 1)
        return 0

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        """As in `EpochClaims`, but returns `numbers` if the join point is gone or has no room for more epochs."""
        with contextlib.suppress(JoinPointLostError):
            if not self.by_ids and epoch < _COUNTED_EPOCHS:
                return first_said(self._join_point.compare_set, epoch, numbers)
        return numbers

    def _owner(self, place: int) -> int:
        owner = place % self._num_workers
        if owner == self._worker_id or owner in (there := self._mailbox.peers()):
            return owner
        alive = sorted({*there, self._worker_id})
        return alive[place // self._num_workers % len(alive)]
