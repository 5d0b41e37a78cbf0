"""What a worker has communicated since its last step's record."""

from __future__ import annotations

from paceline.ports.ports import Counts

NO_COUNTS = (0, 0, 0, 0, 0, 0, 0.0)  # of a worker that communicates nothing


class NewCounts:
    """Differences of counts that grow.

    Args:
        counts: the worker's, of its whole life.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._before = NO_COUNTS

    def take(self) -> tuple[int, int, int, int, int, int, float]:
        """Since this was called last."""
        counts, before = self._counts, self._before
        now = self._before = (
            counts.messages, counts.sent_bytes, counts.averages, counts.peer_failures,
            counts.coded_elements, counts.coded_bytes, counts.codec_s,
        )  # fmt: skip
        if not now[4]:
            return now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3], 0, 0, 0.0
        return tuple(new - old for new, old in zip(now, before, strict=True))  # pyright: ignore
