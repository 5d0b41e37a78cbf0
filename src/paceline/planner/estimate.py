"""Results of the planner's models: a value, an interval, and a warning in words; and the intervals' width."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

__all__ = ["CONFIDENCE", "Estimate", "deviations"]

CONFIDENCE = 0.9  # of every interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A predicted value with its 90 % interval, and a warning if the model extrapolates.

    Args:
        value: the prediction.
        low: lower end.
        high: upper end; infinite if the measurements do not bound it.
        extrapolation: how the point lies outside the measurements, in words; "" if it is inside.
    """

    value: float
    low: float
    high: float
    extrapolation: str = ""


def deviations(freedom: float = math.inf) -> float:
    """Half width of an interval in standard deviations, by Student's t; with infinite freedom, by the normal distribution."""
    below = (1 + CONFIDENCE) / 2
    return float(ndtri(below) if math.isinf(freedom) else stdtrit(freedom, below))
