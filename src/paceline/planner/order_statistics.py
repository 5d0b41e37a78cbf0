"""Order statistics of independent, not identically distributed times: how long until all but b of n workers are done.

The number of late workers at t is a sum of unequal coins, and E[T_(n - b)] is the integral of P(more than b are late at t).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import bdtrc, ndtr, ndtri

from paceline.errors import UsageError

__all__ = ["ConstantLaw", "ExponentialLaw", "Law", "NormalLaw", "ParetoLaw", "SampledLaw", "StepTime", "step_times"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_TAIL = 1e-9  # probability that any worker is later than the end of integration; the rest is added in closed form
_PIECES = 160
_GROUPS = 20


class Law(Protocol):
    """The distribution of one worker's time for a gradient, in seconds."""

    def late(self, t_s: np.ndarray) -> np.ndarray:
        """P(T > t), also far out in the tail."""
        ...

    def excess_s(self, t_s: float) -> float:
        """The integral of `late` from t on."""
        ...

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        """Times at which `late` has about these values; between them it is smooth."""
        ...


@dataclass(frozen=True)
class ConstantLaw:
    """A constant time."""

    time_s: float

    def late(self, t_s: np.ndarray) -> np.ndarray:
        return (t_s < self.time_s).astype(float)

    def excess_s(self, t_s: float) -> float:
        return max(0.0, self.time_s - t_s)

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        return np.array([self.time_s])


@dataclass(frozen=True)
class NormalLaw:
    """A normal distribution, truncated to positive times."""

    average_s: float
    deviation_s: float

    @property
    def _above_zero(self) -> float:
        return float(ndtr(self.average_s / self.deviation_s))

    def late(self, t_s: np.ndarray) -> np.ndarray:
        z = (self.average_s - np.maximum(t_s, 0.0)) / self.deviation_s
        return ndtr(z) / self._above_zero

    def excess_s(self, t_s: float) -> float:
        z = (t_s - self.average_s) / self.deviation_s
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return self.deviation_s * max(0.0, density - z * float(ndtr(-z))) / self._above_zero

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        return self.average_s - self.deviation_s * ndtri(late * self._above_zero)


@dataclass(frozen=True)
class ExponentialLaw:
    """At least `least_s`, plus an exponential time with mean `tail_s`."""

    least_s: float
    tail_s: float

    def late(self, t_s: np.ndarray) -> np.ndarray:
        return np.exp(-np.maximum(t_s - self.least_s, 0.0) / self.tail_s)

    def excess_s(self, t_s: float) -> float:
        """For t of at least `least_s`."""
        return self.tail_s * math.exp(-(t_s - self.least_s) / self.tail_s)

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        return self.least_s - self.tail_s * np.log(late)


@dataclass(frozen=True)
class ParetoLaw:
    """At least `least_s`, and P(T > t) = (least_s / t) ** shape: occasionally many times as long; `shape` above 1."""

    least_s: float
    shape: float

    def late(self, t_s: np.ndarray) -> np.ndarray:
        return (self.least_s / np.maximum(t_s, self.least_s)) ** self.shape

    def excess_s(self, t_s: float) -> float:
        """For t of at least `least_s`."""
        return t_s * (self.least_s / t_s) ** self.shape / (self.shape - 1)

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        return self.least_s * late ** (-1 / self.shape)


class SampledLaw:
    """The empirical distribution of recorded times.

    Args:
        times_s: in the order in which they were recorded, which determines their interval; at least one, above 0.
    """

    def __init__(self, times_s: Sequence[float] | np.ndarray) -> None:
        self.times_s = np.asarray(times_s, float)
        if (
            self.times_s.ndim != 1
            or not len(self.times_s)
            or not np.all(self.times_s > 0)
            or np.isinf(self.times_s).any()
        ):
            raise UsageError("Times of workers are needed, at least one, all of them above 0 seconds.")
        self._sorted = np.sort(self.times_s)

    def late(self, t_s: np.ndarray) -> np.ndarray:
        return 1 - np.searchsorted(self._sorted, t_s, side="right") / len(self._sorted)

    def excess_s(self, t_s: float) -> float:
        return float(np.maximum(self._sorted - t_s, 0.0).mean())

    def pieces_s(self, late: np.ndarray) -> np.ndarray:
        return np.unique(self._sorted)

    def without(self) -> list[SampledLaw]:
        """Jackknife: this law without each of up to 20 groups of neighbouring times; empty for a single time."""
        groups = np.array_split(np.arange(len(self.times_s)), min(_GROUPS, len(self.times_s)))
        return [SampledLaw(np.delete(self.times_s, group)) for group in groups] if len(groups) > 1 else []


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The duration of steps that end with the k-th of n gradients.

    Args:
        low_s: 5 % of the steps are shorter.
    """

    mean_s: float
    low_s: float
    high_s: float


def step_times(law: Law, factors: Sequence[float], most_late: int) -> list[StepTime]:
    """Steps that end when at most b workers are still late, for b = 0, 1, ... `most_late`.

    Costs a few milliseconds; more for many workers, different factors or recorded times.

    >>> [round(one.mean_s, 6) for one in step_times(ExponentialLaw(0.0, 1.0), [1.0, 1.0], 1)]  # 1 + 1/2, and 1/2
    [1.5, 0.5]

    Args:
        law: of the time of a worker.
        factors: of each worker, on that time.
        most_late: fewer than workers.
    """
    groups, n = Counter(map(float, factors)), len(factors)
    number = round(_PIECES * max(1.0, math.sqrt(n / 32)))  # order statistics of large n are narrow
    graded = 1 / (1 + np.exp(np.linspace(-25, math.log(n / _TAIL), number)))  # P(T > t), fine at both ends
    jumps = np.unique(np.concatenate([factor * law.pieces_s(graded) for factor in groups]))
    edges = np.concatenate([[0.0], jumps[jumps > 0]])
    half = np.diff(edges) / 2
    t_s = ((edges[:-1] + half)[:, None] + half[:, None] * _NODES).ravel()
    widths_s = (half[:, None] * _WEIGHTS).ravel()
    beyond_s = sum(count * factor * law.excess_s(float(edges[-1]) / factor) for factor, count in groups.items())
    found = []
    for b, more_late in enumerate(_more_late(law, groups, t_s, most_late)):
        mean_s = float(more_late @ widths_s) + (beyond_s if b == 0 else 0.0)
        low_s, high_s = (float(t_s[min(np.searchsorted(-more_late, -p), len(t_s) - 1)]) for p in (0.95, 0.05))
        found.append(StepTime(mean_s=mean_s, low_s=low_s, high_s=high_s))
    return found


def _more_late(law: Law, groups: Counter[float], t_s: np.ndarray, most_late: int) -> list[np.ndarray]:
    """P(more than b workers are late at t), (times,), for b = 0 ... `most_late`.

    The largest group has a binomial distribution's tail; the others are convolved with it. All terms are positive, so
    there is no cancellation far out in the tail.
    """
    (factor, number), *others = groups.most_common()
    alike = _binomial_tail(number, np.clip(law.late(t_s / factor), 0.0, 1.0))
    chances = [np.ones(len(t_s))]  # of each number of late workers in the other groups
    for factor, count in others:
        p = np.clip(law.late(t_s / factor), 0.0, 1.0)
        for _ in range(count):
            in_time, late = [one * (1 - p) for one in chances], [one * p for one in chances]
            chances = [in_time[0], *(x + y for x, y in zip(in_time[1:], late[:-1], strict=True)), late[-1]]
    nothing = np.zeros(len(t_s))
    return [sum((one * alike(b - j) for j, one in enumerate(chances)), nothing) for b in range(most_late + 1)]


def _binomial_tail(number: int, p: np.ndarray) -> Callable[[int], np.ndarray]:
    """P(more than k of `number`), as a function of k, which may be negative."""

    def more_than(k: int) -> np.ndarray:
        if k < 0:
            return np.ones(len(p))
        return bdtrc(k, number, p) if k < number else np.zeros(len(p))

    return more_than
