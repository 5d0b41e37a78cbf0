"""Threads that run one kernel together, and the order in which examples are visited."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.sparse.instructions import compiled, prefetch_to_write
from paceline.system.machine import num_cores

WORTH_A_THREAD = 50_000
"""Non-zeros in a pass that one more thread must have to itself: fewer are done before it has started."""


def count_threads(n_jobs: int | None, nonzeros: int) -> int:
    """The number of threads: `n_jobs`, or all cores of this process for None and -1; fewer for small data.

    Raises:
        UsageError: 0, or a negative number other than -1.
    """
    if n_jobs is not None and (isinstance(n_jobs, bool) or int(n_jobs) != n_jobs or (n_jobs < 1 and n_jobs != -1)):
        raise UsageError(f"n_jobs must be 1 or more, or -1 or None for all cores, not {n_jobs}.")
    wanted = num_cores() if n_jobs is None or n_jobs == -1 else int(n_jobs)
    return max(1, min(wanted, nonzeros // WORTH_A_THREAD))


class Team:
    """Runs a function on all threads at the same time. A context manager; its end stops the threads.

    Attributes:
        clock: address of a counter that is zero when a run begins, like the 192 bytes behind it.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._words = np.zeros(48, np.int64)  # the counter has a cache line to itself
        self.clock = self._words[8:].ctypes.data
        self._pool = ThreadPoolExecutor(threads - 1, "paceline-sparse") if threads > 1 else None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, job: Callable[[int], Any]) -> None:
        """Calls `job(thread)` on every thread, 0 being this one; returns when all have ended."""
        self._words[:] = 0
        others = [self._pool.submit(job, thread) for thread in range(1, self.threads)] if self._pool else []
        try:
            job(0)
        finally:
            for other in others:
                other.result()


@compiled
def shuffle(order: np.ndarray, seed: int) -> None:
    """Fisher and Yates' shuffle in place; the generator is SplitMix64."""
    place = np.uint64(0)
    while place < np.uint64(order.size):  # after a pass, the order is in other cores' caches, if in any
        prefetch_to_write(order, place)  # pyright: ignore[reportCallIssue]
        place += np.uint64(64 // order.itemsize)
    state = np.uint64(seed)
    for last in range(order.size - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        word = state
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
        # The upper half times the range: no division, and a bias below range / 2**32.
        other = ((word >> np.uint64(32)) * np.uint64(last + 1)) >> np.uint64(32)
        kept = order[last]
        order[last] = order[other]
        order[other] = kept
