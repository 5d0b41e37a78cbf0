"""Injected slowdown: a real worker whose gradients take several times as long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.errors import UsageError, shown
from paceline.specs.bounds import FACTOR_FROM_1

_SLICE_S = 0.05


class Slowness:
    """Makes one worker's gradients take `factor` times as long by sleeping, so that others can use the core."""

    def __init__(self, factor: float, stopped: Callable[[], bool]) -> None:
        self._factor = factor  # 1 or more
        self._stopped = stopped  # whether the run is being stopped, which ends a sleep
        self._ended_s = 0.0  # when the last sleep did

    def sleep(self, since_s: float) -> None:
        """Sleeps `factor - 1` times the time since `since_s`, when the gradient's computation began.

        If a gradient takes several passes, each is slowed separately.
        """
        now_s = time.monotonic()
        until_s = now_s + (self._factor - 1) * (now_s - max(since_s, self._ended_s))
        while now_s < until_s and not self._stopped():
            time.sleep(min(_SLICE_S, until_s - now_s))
            now_s = time.monotonic()
        self._ended_s = now_s


def checked_factors(slow: Mapping[int, float] | None, num_workers: int) -> dict[int, float]:
    """By worker, how many times as long its gradients take; workers without an entry are not slowed.

    Raises:
        UsageError: no such worker, or a factor below 1.
    """
    if slow is not None and not isinstance(slow, Mapping):
        raise UsageError(f"slow maps workers to factors, as {{0: 10}}, which {shown(slow)} does not.")
    factors = {}
    for worker, factor in (slow or {}).items():
        try:
            factors[int(worker)] = float(factor)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"slow maps workers to factors, not {shown(worker)} to {shown(factor)}.") from error
    for worker, factor in factors.items():
        if not 0 <= worker < num_workers:
            raise UsageError(
                f"slow names worker {shown(worker)}, but there are {num_workers} workers, numbered from 0."
            )
        FACTOR_FROM_1.check(f"What worker {worker} is slowed by", factor)
    return factors
