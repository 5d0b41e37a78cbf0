"""How stale the updates of a run were: one histogram in shared memory, counted by all workers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.memory.atomics import fetch_add, kernel, load
from paceline.memory.segment import WORD_BYTES, Layout, Segment

NUM_BINS = 1024


@kernel("void(int64, int64)")
def _add(bins: int, staleness: int) -> None:
    fetch_add(bins + min(max(staleness, 0), NUM_BINS - 1) * WORD_BYTES, 1)


@kernel("int64(int64, int64)")
def _count_below(bins: int, staleness: int) -> int:
    count = 0
    for each in range(min(max(staleness, 0), NUM_BINS)):
        count += load(bins + each * WORD_BYTES)
    return count


class SharedStalenessCounts:
    """Counts of updates by staleness; implements `StalenessCounts`.

    Bin i counts staleness i; the last one counts everything from there on. Costs: `add` 0.2 us, `share_below` 0.7 us.
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        self._counts = segment.array(offset, NUM_BINS, np.int64)
        self._bins = segment.address + offset

    @staticmethod
    def reserve(layout: Layout, *, name: str = "staleness") -> int:
        return layout.reserve(name, NUM_BINS * WORD_BYTES)

    def add(self, staleness: int) -> None:
        _add(self._bins, staleness)

    def share_below(self, staleness: int) -> float:
        total = self.total()
        # Others may count between the two sums: without the bound a share could come out a little above 1.
        return min(_count_below(self._bins, staleness) / total, 1.0) if total else 0.0

    def total(self) -> int:
        return _count_below(self._bins, NUM_BINS)

    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts.copy()
