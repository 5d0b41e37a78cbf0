"""What the planner's models answer with: a value, an interval, and a warning in words; how wide their intervals are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

__all__ = ["CONFIDENCE", "Estimate", "deviations"]

CONFIDENCE = 0.9  # of every interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A predicted value, between which values it lies with a confidence of 90 %, and where the model left what was seen.

    Args:
        value: the prediction.
        low: lower end.
        high: upper end; infinite where the measurements say nothing about it.
        extrapolation: in which respect this is outside of what was measured, as words; "" if it is inside.
    """

    value: float
    low: float
    high: float
    extrapolation: str = ""


def deviations(freedom: float = math.inf) -> float:
    """How many standard deviations an interval reaches to each side, by Student's t; with infinite freedom, by the normal."""
    below = (1 + CONFIDENCE) / 2
    return float(ndtri(below) if math.isinf(freedom) else stdtrit(freedom, below))
