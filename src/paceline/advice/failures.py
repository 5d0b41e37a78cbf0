"""The time that killed workers add to a prediction."""

from __future__ import annotations

import dataclasses
import math

from paceline.advice.answer import Prediction
from paceline.algorithms import registry
from paceline.planner.failures import availability, expected_s

CHECKPOINT_EVERY_S = 10.0  # of `launch` and `train`, if epochs are shorter: they save when an epoch begins


def tolerates(algorithm: str) -> bool:
    """Whether the other workers continue when one is killed."""
    return "kill" in registry.build(algorithm).tolerates


def with_kills(one: Prediction, *, kills_per_s: float, restart_s: float) -> Prediction:
    """Adds the expected cost of kills, `kills_per_s` of each worker, to a prediction.

    Methods that continue lose a worker's share until it restarts; others lose all progress since the last checkpoint.
    """
    before = one.time_s
    if before is None or not kills_per_s:
        return one
    m, ends = one.candidate.workers, ("value", "low", "high")
    goes_on = tolerates(one.candidate.algorithm)
    share = availability(kills_per_s=kills_per_s, restart_s=restart_s) if goes_on else 1.0

    def slower(time_s: float) -> float:
        if goes_on or math.isinf(time_s):
            return time_s / share
        return expected_s(time_s, kills_per_s=m * kills_per_s, interval_s=CHECKPOINT_EVERY_S, restart_s=restart_s)

    speed = {end: getattr(one.samples_per_s, end) * share for end in ends}
    one = dataclasses.replace(one, samples_per_s=dataclasses.replace(one.samples_per_s, **speed))
    time_s = dataclasses.replace(before, **{end: slower(getattr(before, end)) for end in ends})
    if math.isinf(time_s.value):
        return dataclasses.replace(
            one,
            time_s=None,
            at_deadline=None,
            why_not="workers are killed too often for it to get from one checkpoint to the next",
        )
    return dataclasses.replace(one, time_s=time_s)


def restarts(one: Prediction, kills_per_s: float) -> int:
    """The number of restarts to allow: the expected number and three standard deviations; 0 if they do not help."""
    if not kills_per_s or one.time_s is None or not tolerates(one.candidate.algorithm):
        return 0
    longest_s = one.time_s.high if math.isfinite(one.time_s.high) else one.time_s.value
    expected = one.candidate.workers * kills_per_s * longest_s
    return math.ceil(expected + 3 * math.sqrt(expected))
