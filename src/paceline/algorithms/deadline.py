"""How long to wait for an answer: measured, not guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_WINDOW = 64


class MeasuredDeadline:
    """median + spread * MAD of the last 64 waits, MAD being the median distance from the median.

    Both are robust to a few outliers. Callers also add waits that timed out, once their answer arrives: a deadline that
    learns only from timely answers never learns that the network is slower.

    Args:
        spread: how many MADs above the median.
        least_s: lower bound, so that one busy moment of an otherwise steady network does not end a wait.
        first_s: the deadline until 8 waits are known.
    """

    def __init__(self, *, spread: float = 20.0, least_s: float = 1.0, first_s: float = 10.0) -> None:
        self._spread = spread
        self._least_s = least_s
        self._waits_s: deque[float] = deque(maxlen=_WINDOW)
        self.value_s = first_s
        self._num_new = 0

    def add(self, wait_s: float) -> None:
        self._waits_s.append(wait_s)
        self._num_new += 1
        if len(self._waits_s) < 8 or self._num_new < 8:  # eight at a time: medians cost more than a simulated exchange
            return
        self._num_new = 0
        longest_s = max(self._waits_s)
        if longest_s + self._spread * (longest_s - min(self._waits_s)) <= self._least_s:
            self.value_s = self._least_s  # the lower bound wins for any medians
            return
        middle_s = _median(self._waits_s)
        deviation_s = _median([abs(one - middle_s) for one in self._waits_s])
        self.value_s = max(self._least_s, middle_s + self._spread * deviation_s)


def _median(values: Iterable[float]) -> float:
    """As `statistics.median`, in a third of its time."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
