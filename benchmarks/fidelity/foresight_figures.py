"""The arithmetic that compares predictions with measurements: errors, distances between distributions, choices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["mean", "median", "relative_error", "shortfall", "staleness_of", "total_variation"]


def relative_error(predicted: float, measured: float) -> float:
    """Predicted over measured, minus 1."""
    return predicted / measured - 1


def total_variation(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference that two distributions make to any event: half the sum of |a_i - b_i|; 0 to 1.

    Args:
        a: counts or shares of 0, 1, 2, ...; some above 0.
        b: the same, of any length.
    """
    longest = max(len(a), len(b))
    first, second = (np.pad(np.asarray(one, float), (0, longest - len(one))) for one in (a, b))
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def shortfall(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[str, str, float]:
    """What was advised, what was best, and by which share of the best the advised is slower; both maps are of speeds."""
    advised, best = max(predicted, key=predicted.__getitem__), max(measured, key=measured.__getitem__)
    return advised, best, 1 - measured[advised] / measured[best]


def median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of one figure of several runs."""
    return statistics.median(run[name] for run in runs)


def staleness_of(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Counts of 0, 1, 2, ... in all runs together."""
    longest = max(len(run["staleness"]) for run in runs)
    return np.sum([np.pad(run["staleness"], (0, longest - len(run["staleness"]))) for run in runs], axis=0).tolist()


def mean(counts: Sequence[float]) -> float:
    """Of a distribution."""
    return math.fsum(staleness * count for staleness, count in enumerate(counts)) / math.fsum(counts)
