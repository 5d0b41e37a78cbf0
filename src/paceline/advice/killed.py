"""What kills of workers add to a predicted time."""

from __future__ import annotations

import dataclasses
import math

from paceline.advice.answer import Prediction
from paceline.algorithms import registry
from paceline.planner.estimate import Estimate
from paceline.planner.failures import availability, expected_s

__all__ = ["CHECKPOINT_EVERY_S", "restarts", "with_kills"]

CHECKPOINT_EVERY_S = 10.0  # as `launch` and `train` do where epochs are not longer: they save at an epoch's beginning


def tolerates(algorithm: str) -> bool:
    """Whether the others go on when a worker is killed."""
    return "kill" in registry.build(algorithm).tolerates


def with_kills(one: Prediction, *, kills_per_s: float, restart_s: float) -> Prediction:
    """The prediction with expected times under kills; all else stays what it is without.

    Methods that go on lose a worker's share until it is back; others everything since the last checkpoint.

    Args:
        one: without kills.
        kills_per_s: of each worker.
        restart_s: until a worker is back.
    """
    before = one.time_s
    if before is None or not kills_per_s:
        return one
    m = one.candidate.workers
    if tolerates(one.candidate.algorithm):
        share = availability(kills_per_s=kills_per_s, restart_s=restart_s)

        def slower(time_s: float) -> float:
            return time_s / share

        speed = {
            end: getattr(one.samples_per_s, end) * share for end in ("value", "low", "high")
        }  # fmt: skip
        one = dataclasses.replace(one, samples_per_s=dataclasses.replace(one.samples_per_s, **speed))
    else:

        def slower(time_s: float) -> float:
            if math.isinf(time_s):
                return time_s
            return expected_s(time_s, kills_per_s=m * kills_per_s, interval_s=CHECKPOINT_EVERY_S, restart_s=restart_s)

    time_s = Estimate(
        value=slower(before.value), low=slower(before.low), high=slower(before.high), extrapolation=before.extrapolation
    )
    if math.isinf(time_s.value):
        return dataclasses.replace(
            one,
            time_s=None,
            at_deadline=None,
            why_not="workers are killed more often than it gets from checkpoint to checkpoint",
        )
    return dataclasses.replace(one, time_s=time_s)


def restarts(one: Prediction, kills_per_s: float) -> int:
    """How many restarts to allow: those expected, and three standard deviations; 0 where they do not help."""
    if not kills_per_s or one.time_s is None or not tolerates(one.candidate.algorithm):
        return 0
    expected = (
        one.candidate.workers * kills_per_s * (one.time_s.high if math.isfinite(one.time_s.high) else one.time_s.value)
    )
    return math.ceil(expected + 3 * math.sqrt(expected))
