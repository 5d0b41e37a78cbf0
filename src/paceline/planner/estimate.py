"""Results of the planner's models: a value, an interval, and whether it extrapolates; and the intervals' width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.9  # of every interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A predicted value with its 90 % interval."""

    value: float
    low: float
    high: float  # infinite if the measurements do not bound it
    extrapolated: bool = False  # whether the point lies outside the measurements


def deviations(freedom: float = math.inf) -> float:
    """Half width of an interval in standard deviations, by Student's t; with infinite freedom, by the normal distribution."""
    below = (1 + CONFIDENCE) / 2
    return float(ndtri(below) if math.isinf(freedom) else stdtrit(freedom, below))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSpread:
    """A standard deviation of logarithms, and from how many independent values it is."""

    deviation: float = 0.0  # of one value about what is predicted for it
    freedom: float = math.inf  # degrees of freedom; infinite: it is known


def half_width(parts: Sequence[LogSpread]) -> float:
    """Half of the interval of a logarithm that is off by the sum of independent parts, by Welch's and Satterthwaite's rule."""
    variance = sum(one.deviation**2 for one in parts)
    if variance == 0:
        return 0.0
    freedom = variance**2 / max(1e-300, sum(one.deviation**4 / one.freedom for one in parts))
    return deviations(min(freedom, 1e6)) * math.sqrt(variance)


def within_factor(value: float, half: float, *, open_above: bool = False) -> Estimate:
    """A value whose logarithm is known to within `half`; with `open_above`, its upper end is unknown."""
    return Estimate(value=value, low=value * math.exp(-half), high=math.inf if open_above else value * math.exp(half))
