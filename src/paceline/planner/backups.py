"""The best number of backup workers, from workers' times and the value of fewer gradients.

The time of a step is E[T_(k)] + rest, where T_(k) is the k-th smallest of the workers' times. With McCandlish et al.'s noise
scale B and batches of s samples, `half_efficient` of `paceline.planner.backup_times` is B / s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import UsageError
from paceline.planner.backup_times import (
    PUBLISHED_HALF_EFFICIENT,
    arrived_step_s,
    steps_to_target,
    time_to_target,
)
from paceline.planner.estimate import Estimate, deviations, within_factor
from paceline.planner.order_statistics import Law, RecordedTimes, step_times


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupOption:
    """Predictions for b backups."""

    backups: int  # b
    machines: int  # n, backups included
    gradients_per_step: int  # k, which a step averages
    step_s: Estimate  # expected time of a step; without an interval if times are a formula
    steps_5_percent_s: float  # 5 % of the steps are shorter
    steps_95_percent_s: float
    throughput_relative: float  # gradients used per second, relative to b = 0, as are the following
    steps_relative: float  # to the target
    time_relative: Estimate  # to the target
    machine_time_relative: float  # time times machines


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupPlan:
    """Every b considered, and the best."""

    rows: tuple[BackupOption, ...]  # from b = 0 on
    #: With the least time to the target; if backups are spare machines, the least time times machines.
    best: BackupOption
    sure: float | None  # share of recorded times' subsets that give the same best b; None: the times are a formula

    def within(self, share: float) -> list[int]:
        """The b whose time is at most `share` above the best's."""
        return [
            row.backups for row in self.rows if row.time_relative.value <= self.best.time_relative.value * (1 + share)
        ]


def plan_backups(
    law: Law,  # of the time of a worker
    factors: Sequence[float],  # of each worker, on that time
    *,
    # Number of gradients at which one is worth half of what it is worth alone; inf: steps fall as 1 / k.
    half_efficient: float = PUBLISHED_HALF_EFFICIENT,
    max_backups: int | None = None,  # maximum to consider; None: a quarter of the workers, at least 1
    rest_s: float = 0.0,  # the remaining time of every step: messages and update
    # Backups are additional machines, as fast as a worker of factor 1, so that k stays; the best b then has the least
    # time times machines.
    spare: bool = False,
) -> BackupPlan:
    """Which b has the least expected time to the target.

    Raises:
        UsageError: no workers, or invalid numbers.
    """
    n = len(factors)
    if not n or not all(0 < one < math.inf for one in factors):
        raise UsageError("Planning backups needs at least 1 worker, and factors above 0 for the workers' times.")
    if not 0 <= rest_s < math.inf:
        raise UsageError(f"The rest of a step must be 0 seconds or more, not {rest_s}.")
    most = max(1, n // 4) if max_backups is None else max_backups
    most = most if spare else min(most, n - 1)
    if most < 0:
        raise UsageError(f"The maximum number of backups must be 0 or more, not {most}.")
    gradients = [n if spare else n - b for b in range(most + 1)]

    def steps_s(of: Law) -> np.ndarray:
        if not spare:
            return rest_s + step_times(of, factors, most)
        return rest_s + np.array([step_times(of, [*factors, *[1.0] * b], b)[b] for b in range(most + 1)])

    subsets = [steps_s(part) for part in law.without()] if isinstance(law, RecordedTimes) else []
    return _plan(steps_s(law), gradients, half_efficient, spare=spare, subsets=subsets)


def plan_arrivals(
    arrivals_s: np.ndarray, *, half_efficient: float = PUBLISHED_HALF_EFFICIENT, max_backups: int | None = None
) -> BackupPlan:
    """Like `plan_backups`, from steps whose times were recorded together, without intervals; `arrived_step_s` says how.

    Raises:
        ValueError: no arrivals.
        UsageError: half_efficient is below 0.
    """
    mean_s = arrived_step_s(arrivals_s, max_backups)
    ends_s = np.sort(np.sort(arrivals_s, axis=1)[:, ::-1], axis=0)  # of steps with b = 0, 1, ..., the shortest first
    low_s, high_s = (ends_s[round(share * (len(ends_s) - 1))][: len(mean_s)] for share in (0.05, 0.95))
    gradients = [arrivals_s.shape[1] - b for b in range(len(mean_s))]
    return _plan(np.stack([mean_s, low_s, high_s], axis=1), gradients, half_efficient)


def _plan(
    steps_s: np.ndarray,
    gradients: Sequence[int],
    half_efficient: float,
    *,
    spare: bool = False,
    subsets: Sequence[np.ndarray] = (),
) -> BackupPlan:
    """The choice from `step_times` of b = 0, 1, ... backups; `subsets` are the same, each without a part of the records."""
    if not half_efficient >= 0:
        raise UsageError(f"half_efficient must be 0 or more, not {half_efficient}.")
    n, mean_s = gradients[0], steps_s[:, 0]
    total, *totals = (time_to_target(one[:, 0], gradients, half_efficient) for one in (steps_s, *subsets))
    machines = np.array([n + b if spare else n for b in range(len(gradients))])
    rows = tuple(
        BackupOption(
            backups=b,
            machines=int(machines[b]),
            gradients_per_step=k,
            step_s=_interval(mean_s[b], [part[b, 0] for part in subsets]),
            steps_5_percent_s=float(steps_s[b, 1]),
            steps_95_percent_s=float(steps_s[b, 2]),
            throughput_relative=float(k / n * mean_s[0] / mean_s[b]) if np.isfinite(mean_s[b]) else 0.0,
            steps_relative=steps_to_target(k, half_efficient) / steps_to_target(n, half_efficient),
            time_relative=_interval(total[b], [part[b] for part in totals]),
            machine_time_relative=float(total[b] * machines[b] / n),
        )
        for b, k in enumerate(gradients)
    )
    best = rows[int(np.argmin(total * machines))]
    agree = [int(np.argmin(part * machines)) == best.backups for part in totals]
    return BackupPlan(rows=rows, best=best, sure=sum(agree) / len(agree) if agree else None)


def _interval(value: float, without: Sequence[float]) -> Estimate:
    """The jackknife of its logarithm over groups of neighbouring times, so that slow changes count once per group."""
    value, g = float(value), len(without)
    if g < 2:
        return within_factor(value, 0.0)
    logs = np.log(without)
    deviation = math.sqrt((g - 1) / g * float(np.sum((logs - logs.mean()) ** 2)))
    return within_factor(value, deviations(g - 1) * deviation)
