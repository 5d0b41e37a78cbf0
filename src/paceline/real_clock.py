"""The clock of real workers."""

from __future__ import annotations

import os
import time

__all__ = ["RealClock"]


class RealClock:
    """The machine's monotonic clock, which all processes of a machine share; counts what was slept."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    now_s = staticmethod(time.monotonic)

    def sleep_s(self, duration_s: float) -> None:
        """Waits at least `duration_s`: yields the core for short waits, as the system's timer is good for about 60 us only."""
        begun_s = time.monotonic()
        end_s = begun_s + duration_s
        if duration_s > 200e-6:
            time.sleep(duration_s - 100e-6)
        while (now_s := time.monotonic()) < end_s:
            os.sched_yield()
        self.waited_s += now_s - begun_s
