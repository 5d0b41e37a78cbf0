"""The next batch of a worker in a loop's epoch: claimed from shared counts, or given by its place in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from paceline.data.batches import LoaderBatches
from paceline.data.epoch_claims import EpochClaims
from paceline.data.round_deal import ALL_LEFT, Left, RoundDeal
from paceline.data.sources import ABSENT, END
from paceline.ports.views import Survivors


class WorkerClaims:
    """Hands out batch numbers: global numbers over all epochs, `epoch * batches.epoch_numbers + place`.

    Args:
        batches: the loader's; batches are claimed from the epoch that began last.
        left: batches that remain for a resumed run, with any number of workers; without lockstep all from its first on.
        taken: batches, or in lockstep rounds, that this worker took before; an epoch left at a `break` counts as a whole.
        done: without lockstep: batches to skip, because a resumed run begins with their updates.
        tracks, survivors: as for `RoundDeal`.
        agreed: finds a number on one of the workers that train on the same batches, and sends it to all of them.
    """

    def __init__(
        self,
        batches: LoaderBatches,
        *,
        worker_id: int,
        num_workers: int,
        lockstep: bool,
        counts: EpochClaims,
        left: Left = ALL_LEFT,
        taken: int = 0,
        done: Collection[int] = (),
        tracks: bool = False,
        survivors: Survivors | None = None,
        agreed: Callable[[Callable[[], int]], int] = lambda find: find(),
    ) -> None:
        self.batches = batches
        self.taken = taken
        self.deal = None  # assigns the rounds' batches, in lockstep
        if lockstep:
            self.deal = RoundDeal(
                worker_id, num_workers, left, tracks=tracks, survivors=survivors, shares=batches.shares
            )
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._counts, self._agreed = counts, agreed
        self._first = left.first
        self._done = done
        self.epoch = -1  # none has begun
        self._round = self._epoch_round = taken
        self._unstepped: list[int] = []  # batches of earlier epochs in the step that was under way when this one began
        self._ahead: set[int] = set()
        self.num_claimed = 0  # batches claimed from the shared counts
        # The number below which each batch belongs to some worker; None: unknown, because an epoch was left early.
        self.reached: int | None = 0

    @property
    def is_shared(self) -> bool:
        return self.deal is None

    def begin(self, epoch: int, num_unstepped: int = 0) -> None:
        """Begins the loop's next epoch, even if the last one has not ended.

        `num_unstepped`: rounds whose gradients the loop has accumulated without a step.
        """
        unmet = self.deal.unmet(self.batches.has) if self.deal is not None else []
        before, self.epoch = self.epoch, self.batches.begin(epoch, unmet)
        if self.deal is None and self.reached is not None and self.reached < self.epoch * self.batches.epoch_numbers:
            self.reached = None
        if self.deal is not None and self.epoch != before:
            numbers = self.batches.epoch_numbers
            self._unstepped = self._last_rounds(self.deal, num_unstepped, before)
            self.taken = self._round = self._epoch_round = max(
                self.taken, self.epoch * -(-numbers // self._num_workers)
            )
            self.deal.begin(self.taken, self.epoch, numbers, can_repeat=self.batches.can_repeat)
            self.deal.earlier = self.batches.earlier

    def enter(self, given: dict[str, Any]) -> None:
        """Joins an epoch's rounds with the state from `RoundDeal.let_in` of another worker."""
        assert self.deal is not None
        self.deal.enter(given)
        self.taken = self._round = self.deal.begun - 1
        self.batches.earlier = self.deal.earlier

    def next(self) -> int:
        """Claims the next batch: its number, ABSENT (a round without a batch for this worker), or END of the epoch."""
        if self.deal is None:
            number = self._agreed(self._claimed)
            if number != END:
                self.num_claimed += 1
                # If another worker claimed it, this one must still read a stream up to it.
                self.batches.has(self.place(number))
            if self.reached is not None:
                end = number + 1 if number != END else (self.epoch + 1) * self.batches.epoch_numbers
                self.reached = max(self.reached, end)
            return number
        number = self._in_round(self.deal, self._round)
        if number != END:
            self._round += 1
        self.deal.claim(self._round)
        return number

    def dealt(self) -> int:
        """The batch of the loop's next round, which differs from the claimed one if a worker has died since.

        May wait for the others at the end of the epoch.
        """
        assert self.deal is not None
        number = self._in_round(self.deal, self.taken)
        if number == END:
            self.deal.settle()
            number = self._in_round(self.deal, self.taken)
        self.deal.claim(self.taken + 1)
        return number

    def places_of_round(self) -> list[int]:
        """The places in the epoch of all workers' batches in the loop's last round."""
        assert self.deal is not None
        return list(filter(self.batches.has, self.deal.places(self.taken - 1)))

    def hold(self, number: int) -> None:
        """Holds a batch claimed ahead; others take it if this worker dies or gives it back."""
        if self.is_shared:
            self._ahead.add(number)
            self._counts.hold(self._worker_id, number)

    def give_back(self, numbers: Collection[int], *, is_left: bool) -> None:
        """Gives back batches claimed ahead; `is_left`: the loop has left their epoch, and so does a resumed run."""
        given_back = self._ahead.intersection(numbers)
        if given_back:
            self._ahead -= given_back
            self._counts.release(self._worker_id, given_back, is_left=is_left)

    def hand_out(self, number: int) -> None:
        """Counts a batch, or a round without one, as handed to the loop."""
        self.taken += 1
        if self.deal is not None:
            self.deal.hand_out(self.taken - 1)
        if number in self._ahead:
            self._ahead.remove(number)
            self._counts.unhold(self._worker_id, number)

    def take_back(self, number: int) -> None:
        """Counts a round or batch as not taken, because the run ended during its step; negative: no batch."""
        self.taken = max(0, self.taken - 1)
        if number >= 0:
            self.hold(number)

    def left(self) -> Left | None:
        """The batches that remain for a resumed run, in lockstep."""
        return self.deal.left(self.taken) if self.deal is not None else None

    def left_at_epoch(self) -> Left | None:
        """The same as an epoch begins, with the batches of the step under way."""
        return self.deal.left(self.taken, self._unstepped) if self.deal is not None else None

    def place(self, number: int) -> int:
        """A batch's place in the epoch; negative for a batch of an earlier epoch."""
        return number - self.epoch * self.batches.epoch_numbers

    def _last_rounds(self, deal: RoundDeal, num_rounds: int, epoch: int) -> list[int]:
        """Numbers of all workers' batches in the last rounds, of which some may belong to epochs before `epoch`."""
        if not num_rounds:
            return []
        since, numbers = self.taken - num_rounds, self.batches.epoch_numbers
        rounds = range(max(since, self._epoch_round, deal.first_round), self.taken)
        places = [place for round in rounds for place in deal.places(round)]
        own = [epoch * numbers + place for place in places if place < numbers]
        return [*self._unstepped, *own] if since < self._epoch_round else own

    def _in_round(self, deal: RoundDeal, round: int) -> int:
        place = deal.place(round)
        if self._has(place):
            return self.epoch * self.batches.epoch_numbers + place
        return END if deal.is_over(round, self._has) else ABSENT

    def _has(self, place: int) -> bool:
        return place < self.batches.epoch_numbers and self.batches.has(place)

    def _claimed(self) -> int:
        first = self.epoch * self.batches.epoch_numbers
        behind = max(0, self._first - first)  # batches of this epoch that a resumed run skips
        while behind < self.batches.epoch_numbers:
            released = self._counts.take_released(first, first + self.batches.epoch_numbers)
            if released is not None and released not in self._done:
                return released
            claimed = self._counts.claim(self.epoch)
            if claimed is None or not self.batches.has(claimed + behind):
                break
            if first + claimed + behind not in self._done:
                return first + claimed + behind
        return END
