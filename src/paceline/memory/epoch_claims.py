"""How many batches of each epoch have been claimed, in memory that all workers share."""

from __future__ import annotations

from paceline.memory.atomics import compare_and_swap, load
from paceline.memory.segment import LINE_BYTES, Layout, Segment

__all__ = ["SharedEpochClaims"]

_WORDS = 64  # epochs that may be under way at once, where loops leave theirs at different times
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1


class SharedEpochClaims:
    """Implements `EpochClaims` with one word for each epoch: its number, and how many of its batches are claimed.

    A claim is one compare-and-swap. An epoch's word becomes that of the 64th epoch after it; whoever is that late finds
    the epoch over.

    Args:
        segment: the run's memory, all zero where this lies.
        offset: as `reserve` returned it.
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment  # whose memory this is
        self._agreed = segment.address + offset
        self._first = self._agreed + LINE_BYTES

    @staticmethod
    def reserve(layout: Layout) -> int:
        """Reserves the words."""
        return layout.words("epoch claims", 1 + _WORDS)

    def claim(self, epoch: int) -> int | None:
        """The place of the next batch; None: the epoch is long over."""
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
        """The newest epoch."""
        return max(load(self._first + number * LINE_BYTES) >> _PLACE_BITS for number in range(_WORDS))

    def agree(self, digest: int) -> int:
        """The first worker's digest."""
        compare_and_swap(self._agreed, 0, digest)
        return load(self._agreed)
