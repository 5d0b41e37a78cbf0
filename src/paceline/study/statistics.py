"""A study's statistics: medians, shares, arrivals and paired ratios, each with its interval.

Arrays in, small records out; nothing here knows tables or methods. A run that never reached its target is not dropped:
its time is known to lie in an interval (`Times`), and every interval below is valid wherever in it the time was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
MIN_PAIRS = 6  # below, even unanimous pairs are no 95 % interval for the median: 2 x 0.5^5 is 6 %
_MIN_NORMAL_PAIRS = 3
_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class SampleEstimate:
    """A value with its 95 % interval; infinite limits are unknown ones."""

    value: float
    low: float
    high: float
    count: int


def median_estimate(values: np.ndarray | Sequence[float]) -> SampleEstimate:
    """Median of the values other than NaN, with the percentile bootstrap's interval.

    For showing one group, not for findings, because the bootstrap interval of a median is a little too short for few values:
    it covers 93 % for 5 normal values, 89 % for 7, and about 95 % for 11 or more. Equal values have equal intervals.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if len(known) == 0:
        return SampleEstimate(math.nan, math.nan, math.nan, 0)
    middle = float(np.median(known))
    if len(known) == 1 or np.ptp(known) == 0:
        end = middle if len(known) > 1 else math.nan
        return SampleEstimate(middle, end, end, len(known))
    interval = stats.bootstrap(
        (known,), np.median, n_resamples=_RESAMPLES, confidence_level=CONFIDENCE, method="percentile",
        random_state=np.random.default_rng(0),  # pyright: ignore[reportCallIssue] (its name until SciPy 1.15, too)
    ).confidence_interval  # fmt: skip
    return SampleEstimate(middle, float(interval.low), float(interval.high), len(known))


def share_estimate(successes: int, count: int) -> SampleEstimate:
    """A share with Wilson's interval, which is sensible at 0 and at 1 as well.

    >>> estimate = share_estimate(0, 10)
    >>> estimate.value, estimate.low, round(estimate.high, 3)
    (0.0, 0.0, 0.278)
    """
    if count == 0:
        return SampleEstimate(math.nan, 0.0, 1.0, 0)
    interval = stats.binomtest(successes, count).proportion_ci(CONFIDENCE, method="wilson")
    return SampleEstimate(successes / count, float(interval.low), float(interval.high), count)


@dataclass(frozen=True, slots=True)
class Times:
    """Bounds on each run's time (or steps) to a target: it lies between `low` and `high`.

    A run that reached the target has `low == high`. For a run that was stopped before, `low` is the time until then and
    `high` is infinite. A run that diverged or crashed would never have reached the target: both are infinite.
    """

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, times: np.ndarray, ended: np.ndarray, failed: np.ndarray) -> Times:
        """The times of runs, from the columns of a table.

        Args:
            times: when the target was reached; NaN where it was not.
            ended: when each run ended; NaN where that is unknown, too.
            failed: whether it diverged or crashed.
        """
        reached = ~np.isnan(times)
        ended = np.where(np.isnan(ended), 0.0, ended)
        return cls(np.where(reached, times, np.where(failed, np.inf, ended)), np.where(reached, times, np.inf))

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, rows: np.ndarray) -> Times:
        return Times(self.low[rows], self.high[rows])

    @property
    def reached(self) -> np.ndarray:
        return np.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class ArrivalCurve:
    """The share of runs that reached the target over time: one minus the Kaplan-Meier estimate of survival."""

    at: np.ndarray  # the times at which runs reached the target
    share: np.ndarray  # share of runs that had reached it by then
    low: np.ndarray  # its lower limit, by the log-log formula
    high: np.ndarray
    median: SampleEstimate  # when half of the runs had reached it; infinite if fewer than half did
    count: int
    arrived: int


def arrival_curve(times: Times) -> ArrivalCurve:
    """When runs reach the target. Stopped runs are censored at their end; failed runs never arrive.

    Censoring a diverged run would assume that it arrives like the others. Since it does not, the curve ends below 100 %.
    """
    reached = times.reached
    empty = np.empty(0)
    if not reached.any():
        return ArrivalCurve(
            empty, empty, empty, empty, SampleEstimate(math.inf, math.inf, math.inf, len(times)), len(times), 0
        )
    beyond = 2 * float(times.low[np.isfinite(times.low)].max()) + 1  # after everything that was seen
    sample = stats.CensoredData.right_censored(np.where(np.isinf(times.low), beyond, times.low), ~reached)
    curve = stats.ecdf(sample).sf
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The confidence interval is undefined", RuntimeWarning
        )  # once all have arrived
        band = curve.confidence_interval(CONFIDENCE, method="log-log")
    events = np.unique(times.high[reached])
    at = np.searchsorted(curve.quantiles, events)
    survival = curve.probabilities[at]
    # The formula is undefined if no run or every run has arrived; 0 to 1 is always valid.
    low = np.nan_to_num(band.low.probabilities[at], nan=0.0)
    high = np.nan_to_num(band.high.probabilities[at], nan=1.0)
    median = SampleEstimate(
        _first(events, survival <= 0.5), _first(events, low <= 0.5), _first(events, high < 0.5), len(times)
    )
    return ArrivalCurve(events, 1 - survival, 1 - high, 1 - low, median, len(times), int(reached.sum()))


def _first(at: np.ndarray, condition: np.ndarray) -> float:
    return float(at[condition.argmax()]) if condition.any() else math.inf


def log_ratios(base: Times, other: Times) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of each pair's log(base / other); above zero, the other was sooner.

    If neither of two runs reached the target, their ratio is unknown: it lies between minus and plus infinity.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.log(base.low) - np.log(other.high)
        high = np.log(base.high) - np.log(other.low)
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over all pairs of how many times sooner the other of the pair was."""

    #: Lower bound of the median ratio; equal to `at_most` unless runs that did not arrive leave it unknown.
    at_least: float
    at_most: float
    low: float  # lower limit of the 95 % interval; 0 if there is none
    high: float  # upper limit; infinite if there is none
    p_value: float  # of the hypothesis that both are equally soon
    pairs: int
    complete: int  # number of pairs in which both reached the target
    method: Literal["order statistics", "t", "none"]  # of the interval: `order statistics`, `t` or `none`

    @property
    def middle(self) -> float:
        """The median ratio, or its known bound."""
        if math.isfinite(self.at_most) and self.at_least > 0:
            return math.sqrt(self.at_least * self.at_most)
        return self.at_least if self.at_least > 0 and math.isfinite(self.at_least) else math.nan


def paired_ratio(low: np.ndarray, high: np.ndarray, *, one_setting: bool = True) -> Ratio:
    """The median ratio of pairs, from bounds of their log ratios; pairs are taken as independent.

    From `MIN_PAIRS` pairs on, the interval lies between an order statistic of `low` and one of `high`. It covers the median
    for any distribution of times, any reason for not arriving, and pairs from settings with different ratios. Its p-value is
    the sign test's, with every undecided pair counted against. Three to five pairs that all reached the target get Student's
    interval of the mean log ratio, exact if it is normal. Fewer, or with missing arrivals, get none.

    Args:
        low: lower bound of each pair's log ratio.
        high: upper bound of it.
        one_setting: whether the pairs differ only in the seed; few pairs of several settings have no interval, because they
            are not draws from one normal distribution.
    """
    count = len(low)
    complete = np.isfinite(low) & (low == high)
    if count == 0:
        return Ratio(0.0, math.inf, 0.0, math.inf, 1.0, 0, 0, "none")
    low, high = np.sort(low), np.sort(high)
    if one_setting and _MIN_NORMAL_PAIRS <= count < MIN_PAIRS and complete.all():
        return _students(low)
    at_least, at_most = _middle(low, upper=False), _middle(high, upper=True)
    outside = int(stats.binom.ppf((1 - CONFIDENCE) / 2, count, 0.5))
    limits = (low[outside - 1], high[count - outside]) if outside else (-math.inf, math.inf)
    agreeing = max(int((low > 0).sum()), int((high < 0).sum()))
    p_value = min(1.0, 2 * float(stats.binom.sf(agreeing - 1, count, 0.5)))
    return Ratio(
        _exp(at_least), _exp(at_most), _exp(limits[0]), _exp(limits[1]), p_value, count, int(complete.sum()),
        "order statistics" if outside else "none",
    )  # fmt: skip


def _students(logs: np.ndarray) -> Ratio:
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    if spread <= 1e-12 * max(1.0, abs(mean)):  # simulated runs without chance in them
        half, p_value = 0.0, 0.0 if abs(mean) > 1e-9 else 1.0
    else:
        error = spread / math.sqrt(len(logs))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
        p_value = 2 * float(stats.t.sf(abs(mean) / error, len(logs) - 1))
    value, count = _exp(mean), len(logs)
    return Ratio(value, value, _exp(mean - half), _exp(mean + half), p_value, count, count, "t")


def _middle(ordered: np.ndarray, *, upper: bool) -> float:
    """The median; between a number and infinity, the more cautious of the two."""
    below, above = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    if math.isfinite(below) and math.isfinite(above):
        return (below + above) / 2
    return above if upper else below


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def adjusted_p_values(p_values: Sequence[float]) -> np.ndarray:
    """P-values adjusted for many comparisons: of those up to 0.05, at most 5 % are false on average.

    Benjamini and Hochberg's procedure, 1995.
    """
    return stats.false_discovery_control(p_values, method="bh") if len(p_values) else np.empty(0)
