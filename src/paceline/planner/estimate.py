"""What the planner's models answer with: a value, an interval, and a warning in words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Estimate"]

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
