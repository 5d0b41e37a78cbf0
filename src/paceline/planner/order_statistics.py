"""Order statistics of independent, not identically distributed times: how long until all but b of n workers are done.

The number of late workers at t is a sum of unequal coins, and E[T_(n - b)] is the integral of P(more than b are late at t).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from scipy.special import bdtrc

from paceline.errors import UsageError

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_TAIL = 1e-9  # probability that any worker is later than the end of integration; the rest follows from the mean
_PIECES = 160
_GROUPS = 20


class Law(Protocol):
    """The distribution of one worker's time for a gradient, in seconds: a frozen distribution of `scipy.stats`, or records."""

    def sf(self, x: np.ndarray, /) -> Any:
        """P(T > t), also far out in the tail."""
        ...

    def isf(self, q: np.ndarray, /) -> Any:
        """Times at which `sf` has about these values; between them it is smooth."""
        ...

    def mean(self) -> Any:
        """The expected time."""
        ...


class RecordedTimes:
    """The empirical distribution of recorded times; of one time: a constant.

    Args:
        times_s: in the order in which they were recorded, which determines their interval; at least one, above 0.
    """

    def __init__(self, times_s: Sequence[float] | np.ndarray) -> None:
        self.times_s = times_s = np.asarray(times_s, float)
        if times_s.ndim != 1 or not len(times_s) or not np.all((times_s > 0) & (times_s < math.inf)):
            raise UsageError("Give the time of at least one worker; all times must be above 0 seconds.")
        self._sorted = np.sort(times_s)

    def sf(self, x: np.ndarray, /) -> np.ndarray:
        return 1 - np.searchsorted(self._sorted, x, side="right") / len(self._sorted)

    def isf(self, q: np.ndarray, /) -> np.ndarray:
        return np.unique(self._sorted)

    def mean(self) -> float:
        return float(self._sorted.mean())

    def without(self) -> list[RecordedTimes]:
        """Jackknife: this law without each of up to 20 groups of neighbouring times; empty for a single time."""
        groups = np.array_split(np.arange(len(self.times_s)), min(_GROUPS, len(self.times_s)))
        return [RecordedTimes(np.delete(self.times_s, group)) for group in groups] if len(groups) > 1 else []


def step_times(law: Law, factors: Sequence[float], most_late: int) -> np.ndarray:
    """(B, 3) seconds of steps that end when at most b workers are still late, for b = 0, 1, ... `most_late`.

    The columns are the mean, and the 5th and 95th percentiles of the step time. Costs a few milliseconds; more for many
    workers, different factors or recorded times.

    >>> from scipy.stats import expon
    >>> step_times(expon(), [1.0, 1.0], 1)[:, 0].round(6)  # 1 + 1/2, and 1/2
    array([1.5, 0.5])

    Args:
        law: of the time of a worker.
        factors: of each worker, on that time.
        most_late: fewer than workers.
    """
    groups, n = Counter(map(float, factors)), len(factors)
    number = round(_PIECES * max(1.0, math.sqrt(n / 32)))  # order statistics of large n are narrow
    graded = 1 / (1 + np.exp(np.linspace(-25, math.log(n / _TAIL), number)))  # P(T > t), fine at both ends
    jumps = np.unique(np.concatenate([factor * law.isf(graded) for factor in groups]))
    edges = np.concatenate([[0.0], jumps[jumps > 0]])
    half = np.diff(edges) / 2
    t_s = ((edges[:-1] + half)[:, None] + half[:, None] * _NODES).ravel()
    widths_s = (half[:, None] * _WEIGHTS).ravel()
    late = {factor: np.clip(law.sf(t_s / factor), 0.0, 1.0) for factor in groups}
    beyond_s = sum(count * max(0.0, factor * law.mean() - late[factor] @ widths_s) for factor, count in groups.items())
    found = []
    for b, more_late in enumerate(_more_late(groups, late, most_late)):
        mean_s = float(more_late @ widths_s) + (beyond_s if b == 0 else 0.0)
        found.append([mean_s, *(t_s[min(np.searchsorted(-more_late, -p), len(t_s) - 1)] for p in (0.95, 0.05))])
    return np.array(found)


def _more_late(groups: Counter[float], late: dict[float, np.ndarray], most_late: int) -> list[np.ndarray]:
    """P(more than b workers are late), (times,), for b = 0 ... `most_late`.

    The largest group has a binomial distribution's tail; the others are convolved with it. All terms are positive, so
    there is no cancellation far out in the tail.
    """
    (largest, number), *others = groups.most_common()
    chances = [np.ones_like(late[largest])]  # of each number of late workers in the other groups
    for factor, count in others:
        p = late[factor]
        for _ in range(count):
            chances = [(1 - p) * same + p * fewer for same, fewer in zip([*chances, 0.0], [0.0, *chances], strict=True)]
    return [
        np.sum([one * bdtrc(min(b - j, number), number, late[largest]) for j, one in enumerate(chances)], axis=0)
        for b in range(most_late + 1)
    ]
