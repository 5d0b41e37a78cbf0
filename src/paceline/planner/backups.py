"""How many backup workers, from how long workers take and what fewer gradients are worth.

A step of n workers with b backups ends with the k-th gradient, k = n - b. It is shorter than one that waits for all, and more
of them are needed, since each averages fewer gradients:

    time to target ~ steps(k) * (E[T_(k)] + rest),    steps(k) = 1 + half_efficient / k

T_(k) is the k-th smallest of the workers' times. With McCandlish et al.'s noise scale B and batches of s samples it is
half_efficient = B / s. All workers are taken to begin a step together. In truth one that was late begins late as well, and
one that is held up for many steps is missing in all of them: steps with backups take a few percent longer than this says (3 %
with 2 of 10 where a tenth of the time is an exponential tail), and more where tails are heavy.

Reference: Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student_t

from paceline.errors import UsageError
from paceline.planner.estimate import CONFIDENCE, Estimate
from paceline.planner.order_statistics import Law, SampledLaw, StepTime, step_times

__all__ = ["PUBLISHED_HALF_EFFICIENT", "BackupPlan", "BackupRow", "plan_backups"]

PUBLISHED_HALF_EFFICIENT = 411.0  # fits the steps that Chen et al. report for Inception with 50 and with 100 gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupRow:
    """What b backups come to.

    Args:
        backups: b.
        machines: n, backups included.
        gradients: k, of which a step is the mean.
        step_s: expected time of a step; its interval is that of the times it was computed from, none if these are a formula.
        steps_low_s: 5 % of the steps are shorter.
        steps_high_s: 5 % are longer.
        throughput: gradients that count, per second, relative to b = 0.
        steps: to the target, relative to b = 0.
        time: to the target, relative to b = 0, with the interval that `step_s` leaves it.
        machine_time: time times machines, relative to b = 0.
    """

    backups: int
    machines: int
    gradients: int
    step_s: Estimate
    steps_low_s: float
    steps_high_s: float
    throughput: float
    steps: float
    time: Estimate
    machine_time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupPlan:
    """Every b that was considered, and the best.

    Args:
        rows: from b = 0 on.
        best: with the least time to the target; where backups are spare machines, the least time times machines.
        sure: share of recorded times' subsets from which the same b is best; None: the times are a formula.
    """

    rows: tuple[BackupRow, ...]
    best: BackupRow
    sure: float | None

    def within(self, share: float) -> list[int]:
        """The b whose time is at most `share` above the best's."""
        return [row.backups for row in self.rows if row.time.value <= self.best.time.value * (1 + share)]


def plan_backups(
    law: Law,
    factors: Sequence[float],
    *,
    half_efficient: float = PUBLISHED_HALF_EFFICIENT,
    max_backups: int | None = None,
    rest_s: float = 0.0,
    spare: bool = False,
) -> BackupPlan:
    """Which b has the least expected time to the target.

    Args:
        law: of the time of a worker.
        factors: of each worker, on that time.
        half_efficient: number of gradients at which one is worth half of what it is worth alone; inf: steps fall as 1 / k.
        max_backups: most to consider; None: a quarter of the workers, at least 1.
        rest_s: of every step besides: messages and update.
        spare: backups are machines besides the workers, as fast as a worker of factor 1, so that k stays; the best b is then
            that with the least time times machines.

    Raises:
        UsageError: no workers, or numbers that cannot be.
    """
    n = len(factors)
    if not n or not all(0 < one < math.inf for one in factors):
        raise UsageError("Backups are planned for 1 worker or more, whose times have factors above 0.")
    if not half_efficient >= 0:
        raise UsageError(f"half_efficient must be 0 or more, not {half_efficient}.")
    if not 0 <= rest_s < math.inf:
        raise UsageError(f"The rest of a step must be 0 seconds or more, not {rest_s}.")
    most = max(1, n // 4) if max_backups is None else max_backups
    most = most if spare else min(most, n - 1)
    if most < 0:
        raise UsageError(f"The most backups to consider must be 0 or more, not {most}.")
    gradients = [n if spare else n - b for b in range(most + 1)]
    steps = np.array([_steps(half_efficient, k) / _steps(half_efficient, n) for k in gradients])
    machines = np.array([n + b if spare else n for b in range(most + 1)])

    def costs(of: Law) -> tuple[list[StepTime], np.ndarray, np.ndarray]:
        """Step times, and seconds in which the steps for one of b = 0 are made, relative to b = 0."""
        times = _step_times(of, factors, most, spare=spare)
        step_s = rest_s + np.array([one.mean_s for one in times])
        return times, step_s, steps * step_s / step_s[0]

    times, step_s, total = costs(law)
    subsets = [costs(part)[1:] for part in law.without()] if isinstance(law, SampledLaw) else []
    weight = machines / n if spare else np.ones(most + 1)
    rows = tuple(
        BackupRow(
            backups=b,
            machines=int(machines[b]),
            gradients=gradients[b],
            step_s=_interval(float(step_s[b]), [part[b] for part, _ in subsets]),
            steps_low_s=times[b].low_s + rest_s,
            steps_high_s=times[b].high_s + rest_s,
            throughput=float(gradients[b] / n * step_s[0] / step_s[b]),
            steps=float(steps[b]),
            time=_interval(float(total[b]), [part[b] for _, part in subsets]),
            machine_time=float(total[b] * machines[b] / n),
        )
        for b in range(most + 1)
    )
    best = rows[int(np.argmin(total * weight))]
    agree = [int(np.argmin(part * weight)) == best.backups for _, part in subsets]
    return BackupPlan(rows=rows, best=best, sure=sum(agree) / len(agree) if agree else None)


def _steps(half_efficient: float, gradients: int) -> float:
    return 1 / gradients if math.isinf(half_efficient) else 1 + half_efficient / gradients


def _step_times(law: Law, factors: Sequence[float], most: int, *, spare: bool) -> list[StepTime]:
    if not spare:
        return step_times(law, factors, most)
    return [step_times(law, [*factors, *[1.0] * b], b)[b] for b in range(most + 1)]


def _interval(value: float, without: Sequence[float]) -> Estimate:
    """By the jackknife of its logarithm over groups of neighbouring times, so that slow changes count as the few they are."""
    g = len(without)
    if g < 2:
        return Estimate(value=value, low=value, high=value)
    logs = np.log(without)
    deviation = math.sqrt((g - 1) / g * float(np.sum((logs - logs.mean()) ** 2)))
    share = math.exp(float(student_t.ppf((1 + CONFIDENCE) / 2, g - 1)) * deviation)
    return Estimate(value=value, low=value / share, high=value * share)
