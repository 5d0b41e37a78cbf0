"""Which batch of a loop's epoch a worker trains on next: claimed from shared counts, or by its place in a round."""

from __future__ import annotations

from collections.abc import Collection, Container

from paceline.data.epoch_claims import EpochClaims
from paceline.data.loader_batches import LoaderBatches
from paceline.data.sources import ABSENT, END

__all__ = ["WorkerClaims"]


class WorkerClaims:
    """Hands out batch numbers: global numbers over all epochs, `epoch * batches.epoch_numbers + place`.

    Args:
        batches: the loader's; batches are claimed from the epoch that began last.
        worker_id: this worker.
        num_workers: workers of the run.
        lockstep: whether batches are dealt in rounds.
        counts: of claimed batches.
        first: number of the first batch: a resumed run continues there.
        taken: batches that this worker took before, or, in lockstep, its rounds; those of an epoch that the loop left at a
            `break` count with it.
        done: batches that are left out: a resumed run begins with their updates.
        is_late: others may be in a later epoch: this worker begins there.

    Attributes:
        num_given_back: batches that it had claimed ahead; workers of one machine take them.
    """

    def __init__(
        self,
        batches: LoaderBatches,
        *,
        worker_id: int,
        num_workers: int,
        lockstep: bool,
        counts: EpochClaims,
        first: int = 0,
        taken: int = 0,
        done: Container[int] = (),
        is_late: bool = False,
    ) -> None:
        self.batches = batches
        self.taken = taken
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._lockstep = lockstep
        self._counts = counts
        self._first = first
        self._done = done
        self._first_epoch = counts.newest() if is_late else 0
        self._epoch = 0
        self._round = taken
        self._ahead: set[int] = set()
        self.num_given_back = 0

    @property
    def is_shared(self) -> bool:
        """Whether any worker may claim each batch."""
        return not self._lockstep

    @property
    def _epoch_rounds(self) -> int:
        return -(-self.batches.epoch_numbers // self._num_workers)

    def begin(self, epoch: int) -> None:
        """The loop enters its next epoch, wherever it has left the last one."""
        self._epoch = self.batches.begin(epoch)
        if self._lockstep:
            self.taken = self._round = max(self.taken, self._epoch * self._epoch_rounds)

    def next(self) -> int:
        """Claims the next batch: its number, ABSENT (a round without a batch for this worker), or END of the epoch."""
        if not self._lockstep:
            return self._claimed()
        number = self._in_round()
        if number != END:
            self._round += 1
        if self.batches.shares is not None:
            self.batches.shares.next_round = self._round
        return number

    @property
    def first_of_round(self) -> int:
        """The place in the epoch of the first batch of the loop's last round."""
        return (self.taken - 1 - self._epoch * self._epoch_rounds) * self._num_workers

    def hold(self, number: int) -> None:
        """Holds a batch claimed ahead: if this worker dies, or gives it back, others take it."""
        if not self._lockstep:
            self._ahead.add(number)
            self._counts.hold(self._worker_id, number)

    def give_back(self, numbers: Collection[int], *, is_left: bool) -> None:
        """Batches that were claimed ahead; `is_left`: the loop has left their epoch, and a resumed run leaves it, too."""
        given_back = self._ahead.intersection(numbers)
        if given_back:
            self.num_given_back += len(given_back)
            self._ahead -= given_back
            self._counts.release(self._worker_id, given_back, is_left=is_left)

    def hand_out(self, number: int) -> None:
        """The loop gets the batch, or takes part without one."""
        self.taken += 1
        if number in self._ahead:
            self._ahead.remove(number)
            self._counts.unhold(self._worker_id, number)

    def take_back(self, number: int) -> None:
        """Counts a round or batch as not taken, because the run's end cut its step short; negative: no batch."""
        self.taken = max(0, self.taken - 1)
        if number >= 0:
            self.hold(number)

    def place(self, number: int) -> int:
        """A batch's place in its epoch."""
        return number % self.batches.epoch_numbers

    def _in_round(self) -> int:
        place = (self._round - self._epoch * self._epoch_rounds) * self._num_workers
        if place >= self.batches.epoch_numbers or not self.batches.has(place):
            return END
        place += self._worker_id
        return self._epoch * self.batches.epoch_numbers + place if self.batches.has(place) else ABSENT

    def _claimed(self) -> int:
        first = self._epoch * self.batches.epoch_numbers
        behind = max(0, self._first - first)  # batches of this epoch that a resumed run has behind it
        while self._epoch >= self._first_epoch and behind < self.batches.epoch_numbers:
            released = self._counts.take_released(first, first + self.batches.epoch_numbers)
            if released is not None and released not in self._done:
                return released
            claimed = self._counts.claim(self._epoch)
            if claimed is None or not self.batches.has(claimed + behind):
                break
            if first + claimed + behind not in self._done:
                return first + claimed + behind
        return END
