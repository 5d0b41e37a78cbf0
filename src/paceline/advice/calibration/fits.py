"""Evaluates the measurements of many workers: slow workers and links, and the distribution of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import expon, ks_1samp, norm

from paceline.advice.calibration.measurements import Link, rounded
from paceline.simulator.compute import ComputeTime, ExponentialTail, Normal, Recorded

CLEARLY_SLOW_WORKER = 1.05
CLEARLY_SLOW_LINK = 1.2

_MOST_BLOCKS, _LEAST_IN_BLOCK = 10, 4
_CLEARLY_SHARE = 0.9
_CONSTANT_WITHIN = 0.1  # of the median, from the tenth to the ninetieth percentile
_CONSTANT_MEAN_WITHIN = 0.02  # of the median: with rare long steps a time is not constant
_FITS_WITHIN = 0.08  # largest distance of the distribution functions
_FITS_MEAN_WITHIN = 0.03
_MOST_RECORDED = 400


def slow_workers(steps_s: Sequence[Sequence[float]]) -> tuple[int, dict[int, float]]:
    """The median worker, and the factors of those that clearly differ from it, from each worker's steps in order.

    A worker's time is the median of its steps; of an even number of workers, the faster of the middle two is the median.
    Clearly: by more than 5 %, and in nine of ten pairs of blocks of steps, one of each worker, the slower worker's took
    longer, so that a disturbance of a few steps makes no worker slow. A worker that is clearly faster has a factor below 1.
    """
    medians_s = [statistics.median(one) for one in steps_s]
    typical = sorted(range(len(medians_s)), key=medians_s.__getitem__)[(len(medians_s) - 1) // 2]
    blocks = [_block_medians_s(one) for one in steps_s]
    factors = {}
    for worker, median_s in enumerate(medians_s):
        factor = median_s / medians_s[typical]
        slow, fast = (worker, typical) if factor > 1 else (typical, worker)
        if max(factor, 1 / factor) > CLEARLY_SLOW_WORKER and (
            np.greater.outer(blocks[slow], blocks[fast]).mean() >= _CLEARLY_SHARE
        ):
            factors[worker] = rounded(factor)
    return typical, factors


def _block_medians_s(steps_s: Sequence[float]) -> np.ndarray:
    """Medians of consecutive steps, because a disturbance of one step often affects the next, too."""
    number = max(1, min(_MOST_BLOCKS, len(steps_s) // _LEAST_IN_BLOCK))
    return np.array([np.median(block) for block in np.array_split(np.asarray(steps_s), number)])


def compute_time(steps_s: Sequence[Sequence[float]], typical: int) -> float | ComputeTime:
    """The time of the median worker's step: a number if it is nearly constant, else a distribution.

    Uses all workers' steps, each divided by its own worker's median. Returns a normal distribution or an exponential tail if
    one fits; else a trace of consecutive steps, the same number from each worker.
    """
    scale_s = statistics.median(steps_s[typical])
    scaled = [np.asarray(one) / statistics.median(one) * scale_s for one in steps_s]
    pooled = np.sort(np.concatenate(scaled))
    low_s, median_s, high_s = (float(one) for one in np.percentile(pooled, [10, 50, 90]))
    mean_s = float(pooled.mean())
    if high_s - low_s < _CONSTANT_WITHIN * median_s and mean_s < (1 + _CONSTANT_MEAN_WITHIN) * median_s:
        return rounded(median_s)
    for model in sorted(_fits(pooled), key=lambda model: _distance(model, pooled)):
        if _distance(model, pooled) < _FITS_WITHIN and abs(model.mean_s - mean_s) < _FITS_MEAN_WITHIN * mean_s:
            return model
    each = max(1, _MOST_RECORDED // len(scaled))
    return Recorded(times_s=tuple(rounded(float(time_s)) for one in scaled for time_s in one[:each]))


def _fits(pooled: np.ndarray) -> list[Normal | ExponentialTail]:
    """Distributions fitted to the sample's quantiles, which, unlike moments, are robust to a few long steps."""
    below_s, median_s, above_s, high_s = (float(one) for one in np.percentile(pooled, [15.866, 50, 84.134, 90]))
    found: list[Normal | ExponentialTail] = []
    if (deviation_s := (above_s - below_s) / 2) > 0:
        found.append(Normal(average_s=rounded(median_s), deviation_s=rounded(deviation_s)))
    tail_s = (high_s - median_s) / (math.log(10) - math.log(2))
    least_s = median_s - tail_s * math.log(2)
    if tail_s > 0 and least_s > 0:
        found.append(ExponentialTail(least_s=rounded(least_s), tail_s=rounded(tail_s)))
    return found


def _distance(model: Normal | ExponentialTail, pooled: np.ndarray) -> float:
    """The largest distance of the distribution functions of model and sample (Kolmogorov-Smirnov)."""
    law = norm(model.average_s, model.deviation_s) if isinstance(model, Normal) else expon(model.least_s, model.tail_s)
    found: Any = ks_1samp(pooled, law.cdf, method="asymp")
    return float(found.statistic)


def typical_link(links: Mapping[tuple[int, int], Link]) -> Link:
    """Medians over all links, of latency and of bandwidth."""
    return Link(
        statistics.median(one.latency_s for one in links.values()),
        statistics.median(one.bandwidth_bytes_per_s for one in links.values()),
    )


def slow_links(links: Mapping[tuple[int, int], Link], message_bytes: int) -> dict[tuple[int, int], float]:
    """Factors of links on which a message of this size takes over 20 % longer, or less time, than on a typical link."""
    usual = typical_link(links)
    usual_s = usual.latency_s + message_bytes / usual.bandwidth_bytes_per_s
    factors = {}
    for pair, link in sorted(links.items()):
        factor = (link.latency_s + message_bytes / link.bandwidth_bytes_per_s) / usual_s
        if max(factor, 1 / factor) > CLEARLY_SLOW_LINK:
            factors[pair] = rounded(factor)
    return factors
