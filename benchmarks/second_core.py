"""Whether the machine gives two threads two cores just now: a control for everything that compares two threads with one.

Virtual machines have processors that share one core with another at times, or that other programs keep busy. What two
threads then make of a program says nothing about the program. The control multiplies in registers only and touches no
memory, so that two threads on two cores take as long as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from numba import njit

TWO_CORES = 1.8
"""Speed-up of the control from which a round counts."""


@njit(nogil=True, cache=True)
def multiply(times: int) -> float:
    """Eight chains of multiplications: they fill a core, and two threads on one core halve each other."""
    a, b, c, d, e, f, g, h = 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7
    for _ in range(times):
        a, b, c, d = a * 1.0000001, b * 1.0000001, c * 1.0000001, d * 1.0000001
        e, f, g, h = e * 1.0000001, f * 1.0000001, g * 1.0000001, h * 1.0000001
    return a + b + c + d + e + f + g + h


class Pair:
    """Two threads that begin at the same moment."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._barrier = Barrier(2)
        multiply(1)

    def seconds(self, first: Callable[[], object], second: Callable[[], object]) -> float:
        """How long the slower takes."""

        def timed(action: Callable[[], object]) -> float:
            self._barrier.wait()
            began_s = time.perf_counter()
            action()
            return time.perf_counter() - began_s

        return max(self._pool.map(timed, (first, second)))

    def control(self, times: int = 1_000_000) -> float:
        """Speed-up of two threads that share nothing; 2 on two idle cores, 1 on one."""
        began_s = time.perf_counter()
        multiply(times)
        alone_s = time.perf_counter() - began_s
        return 2 * alone_s / self.seconds(lambda: multiply(times), lambda: multiply(times))
