"""The clock of real workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from paceline.errors import RunStopped

_SLICE_S = 0.05  # longest single sleep: the delay until a worker notices that the run is being stopped


class RealClock:
    """The machine's monotonic clock, which all processes of a machine share; counts the time slept."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.stopped: Callable[[], bool] = lambda: False  # whether the run is being stopped, which ends a sleep

    now_s = staticmethod(time.monotonic)

    def sleep_s(self, duration_s: float) -> None:
        """Waits at least `duration_s`: yields the core for short waits, because the system's timer is off by about 60 us.

        Raises:
            RunStopped: the run was stopped meanwhile.
        """
        now_s = begun_s = time.monotonic()
        end_s = begun_s + duration_s
        try:
            while end_s - now_s > 200e-6:
                if self.stopped():
                    raise RunStopped("the run was stopped while this worker slept")
                time.sleep(min(_SLICE_S, end_s - now_s - 100e-6))
                now_s = time.monotonic()
            while now_s < end_s:
                os.sched_yield()
                now_s = time.monotonic()
        finally:
            self.waited_s += now_s - begun_s
