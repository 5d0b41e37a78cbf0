"""Hemingway's two questions, from a system and a convergence model of one algorithm: h(t, m) = g(t / f(m), m).

How many workers reach a loss soonest, and which loss is lowest at a deadline? More workers shorten an iteration, f(m), but
each iteration may achieve less, g(i, m).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.planner.convergence_model import ConvergenceModel
from paceline.planner.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """h of one algorithm."""

    step_s: Callable[[int], Estimate]  # f(m), such as `SystemModel.predict`
    convergence: ConvergenceModel

    def loss(self, time_s: float, workers: int) -> Estimate:
        """The least loss within `time_s`; assumes at most `max_iterations`."""
        step = self.step_s(workers)

        def after(step_s: float) -> Estimate:
            iterations = min(max(1.0, time_s / step_s if step_s > 0 else math.inf), self.convergence.max_iterations)
            return self.convergence.predict(iterations, workers)

        found = after(step.value)
        return Estimate(
            value=found.value,
            low=after(step.low).low,
            high=after(step.high).high,
            extrapolated=step.extrapolated or found.extrapolated,
        )

    def time_to(self, loss: float, workers: int) -> Estimate | None:
        """Seconds until this loss is reached; None: not within the predictable range.

        The errors of iterations and of step time are independent, so their relative errors, as logarithms, add up in
        squares.
        """
        iterations, step = self.convergence.iterations_to(loss, workers), self.step_s(workers)
        if iterations is None:
            return None
        value = iterations.value * step.value
        below, above = (
            math.hypot(
                _log_ratio(getattr(iterations, end), iterations.value), _log_ratio(getattr(step, end), step.value)
            )
            for end in ("low", "high")
        )
        return Estimate(
            value=value,
            low=value * math.exp(-below),
            high=value * _exp(above),
            extrapolated=step.extrapolated or iterations.extrapolated,
        )


def _log_ratio(end: float, value: float) -> float:
    if end <= 0 or math.isinf(end):
        return math.inf
    return math.log(end / value)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
