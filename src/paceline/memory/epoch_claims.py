"""Counts the claimed batches of each epoch, in memory that all workers share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.segment import LINE_BYTES, WORD_BYTES, Layout, Segment

_MOST_HELD = 256  # by a worker
_HELD, _RELEASED, _LEFT, _STATE = 0, 1, 2, 3  # a word's last two bits; above them the batch's number + 1; 0: free
_WORDS = 64  # epochs that may be under way at once, as loops leave theirs at different times
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


class SharedEpochClaims:
    """Implements `EpochClaims` with one word for each epoch: its number, and how many of its batches are claimed.

    A claim is one compare-and-swap. The following words hold the fingerprint of the epoch's data. Every 64th epoch uses the
    same words; a worker that is 64 epochs late finds its epoch over.

    In addition, 256 words per worker hold the batches that it has claimed ahead. Any worker may take a released batch; only
    the worker itself, or the supervisor once the worker is dead, changes the word of a held one.
    """

    def __init__(self, segment: Segment, offset: int, num_workers: int) -> None:
        self._segment = segment  # whose memory this is
        self._num_released = segment.address + offset
        self._first = self._num_released + LINE_BYTES
        self._held = self._first + _WORDS * LINE_BYTES
        self._table = segment.array(self._held - segment.address, (num_workers, _MOST_HELD), np.int64)

    @staticmethod
    def reserve(layout: Layout, num_workers: int) -> int:
        return layout.reserve("epoch claims", (1 + _WORDS) * LINE_BYTES + num_workers * _MOST_HELD * WORD_BYTES)

    def claim(self, epoch: int) -> int | None:
        word = self._first + epoch % _WORDS * LINE_BYTES
        while True:
            found = load(word)
            newest = found >> _PLACE_BITS
            if newest > epoch:
                return None
            place = found & _PLACES if newest == epoch else 0
            if compare_and_swap(word, found, epoch << _PLACE_BITS | place + 1):
                return place

    def newest(self) -> int:
        return max(load(self._first + number * LINE_BYTES) >> _PLACE_BITS for number in range(_WORDS))

    def hold(self, worker_id: int, number: int) -> None:
        """Records a batch that a worker has claimed ahead; no more than 256 at once."""
        free = np.flatnonzero(self._table[worker_id] == 0)
        if not len(free):
            for place in np.flatnonzero(self._table[worker_id] & _STATE == _LEFT):
                self._take(worker_id, int(place))
            free = np.flatnonzero(self._table[worker_id] == 0)
        if len(free):
            store(self._word(worker_id, int(free[0])), (number + 1) << 2 | _HELD)

    def unhold(self, worker_id: int, number: int) -> None:
        self._table[worker_id][self._table[worker_id] == (number + 1) << 2 | _HELD] = 0

    def release(self, worker_id: int, numbers: Collection[int] | None, *, is_left: bool) -> None:
        """Lets other workers take these batches of a worker (None: all of them), which has returned them or died."""
        row = self._table[worker_id].copy()
        for place in np.flatnonzero((row != 0) & (row & _STATE == _HELD)):
            if numbers is not None and (row[place] >> 2) - 1 not in numbers:
                continue
            fetch_add(self._word(worker_id, int(place)), _LEFT if is_left else _RELEASED)
            fetch_add(self._num_released, 1)

    def take_released(self, first: int, end: int) -> int | None:
        if load(self._num_released) > 0:
            numbers = (self._table >> 2) - 1
            found = np.argwhere((self._table & _STATE != _HELD) & (numbers >= first) & (numbers < end))
            for worker_id, place in sorted(found.tolist(), key=lambda one: numbers[*one]):
                if (taken := self._take(worker_id, place)) is not None:
                    return taken
        return None

    def least_kept(self) -> int | None:
        """The first batch that was claimed but not handed out, in an epoch that the loop did not leave."""
        kept = self._table[(self._table != 0) & (self._table & _STATE != _LEFT)]
        return (int(kept.min()) >> 2) - 1 if len(kept) else None

    def _take(self, worker_id: int, place: int) -> int | None:
        """Takes a released batch and returns its number; None if another worker was faster."""
        word = self._word(worker_id, place)
        value = load(word)
        if value & _STATE == _HELD or not compare_and_swap(word, value, 0):
            return None
        fetch_add(self._num_released, -1)
        return (value >> 2) - 1

    def _word(self, worker_id: int, place: int) -> int:
        return self._held + (worker_id * _MOST_HELD + place) * WORD_BYTES

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        first = self._first + epoch % _WORDS * LINE_BYTES + WORD_BYTES
        agreed = list(numbers)
        for place, number in enumerate(numbers):
            agreed[place] = self._agree(first + place * WORD_BYTES, epoch, number)
            if number and agreed[place] != number:
                break  # the following words are for workers whose data agree so far
        return agreed

    def _agree(self, word: int, epoch: int, number: int) -> int:
        while (found := load(word)) >> _PLACE_BITS <= epoch:
            if found >> _PLACE_BITS == epoch and found & _PLACES:
                return found & _PLACES
            if not number or compare_and_swap(word, found, epoch << _PLACE_BITS | number):
                break
        return number
