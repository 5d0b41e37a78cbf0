"""What a worker has communicated since its last step's record."""

from __future__ import annotations

from paceline.ports.ports import Counts

NO_COUNTS = (0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)  # of a worker that communicates nothing


class NewCounts:
    """Differences of counts that grow, and the longest wait."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts  # the worker's, of its whole life
        self._before = NO_COUNTS

    def take(self) -> tuple[int, int, int, int, int, int, int, float, float]:
        counts, before = self._counts, self._before
        partner, partner_s = counts.partner, counts.partner_s
        counts.partner, counts.partner_s = 0, 0.0
        now = self._before = (
            counts.messages, counts.sent_bytes, counts.averages, counts.peer_failures,
            counts.coded_elements, counts.coded_bytes, counts.codec_s,
        )  # fmt: skip
        m, b, a, f = now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]
        if not now[4]:
            return m, b, a, f, 0, 0, partner, 0.0, partner_s
        return m, b, a, f, now[4] - before[4], now[5] - before[5], partner, now[6] - before[6], partner_s
