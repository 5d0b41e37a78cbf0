"""How many backup workers: the number whose step time times number of steps is least.

A step of M = N + b machines ends with the N-th gradient. More backups make steps shorter, by order statistics, and more
numerous, because each step averages fewer gradients:

    time(b) = steps(M - b) * E[time of the (M - b)-th of M arrivals]

All M are taken to begin each step together. A worker that is held up for many steps is missing in all of them: where that is
common, steps with few backups are longer than this says.

Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = [
    "PUBLISHED_HALF_EFFICIENT",
    "BackupChoice",
    "BackupController",
    "BackupRow",
    "StepsModel",
    "choose_backups",
    "learning_rate_factor",
]

PUBLISHED_HALF_EFFICIENT = 411.0  # fits the steps that Chen et al. report for Inception with 50 and with 100 gradients


@dataclass(frozen=True, kw_only=True)
class StepsModel:
    """Steps to converge when each averages N gradients, relative to infinitely many: 1 + half_efficient / N.

    Args:
        half_efficient: N at which a gradient is worth half of what it is worth alone. 411 is Inception, which needs
            little more than half as many steps with 100 workers as with 50; infinity: steps fall as 1 / N for ever.
    """

    half_efficient: float = PUBLISHED_HALF_EFFICIENT

    def __post_init__(self) -> None:
        if not self.half_efficient >= 0:
            raise ValueError(f"half_efficient must be 0 or more, not {self.half_efficient}")

    def steps(self, num_aggregated: int) -> float:
        """In units in which only ratios mean something."""
        if np.isinf(self.half_efficient):
            return 1.0 / num_aggregated
        return 1.0 + self.half_efficient / num_aggregated


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupRow:
    """What b backups would cost.

    Args:
        backups: b.
        step_s: mean time of a step.
        total: step time times steps, relative to b = 0 where that is finite.
        discounted_speed_up: speed-up of a step over b = 0, times the share of machines that count as workers.
    """

    backups: int
    step_s: float
    total: float
    discounted_speed_up: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupChoice:
    """Every b that was considered, and the best."""

    rows: tuple[BackupRow, ...]
    best: BackupRow

    def within(self, share: float) -> list[int]:
        """The b whose total is at most `share` above the best."""
        return [row.backups for row in self.rows if row.total <= self.best.total * (1 + share)]


def choose_backups(
    arrivals_s: np.ndarray, steps: StepsModel | None = None, max_backups: int | None = None
) -> BackupChoice:
    """The b with the least time to converge.

    Args:
        arrivals_s: (steps, M) seconds from a step's beginning to each worker's gradient, in any order within a step; infinity
            for one that never came.
        steps: how the number of steps depends on N.
        max_backups: most backups to consider; None: a quarter of the machines, or 1.

    Raises:
        ValueError: no arrivals.
    """
    if arrivals_s.ndim != 2 or not arrivals_s.size:
        raise ValueError("choosing backups needs the arrival times of at least one step and one worker")
    steps = steps or StepsModel()
    M = arrivals_s.shape[1]
    most = min(max(1, M // 4) if max_backups is None else max_backups, M - 1)
    mean_s = np.sort(arrivals_s, axis=1).mean(axis=0)  # of the k-th arrival, at k - 1
    base_s = float(mean_s[-1])
    base = base_s * steps.steps(M)
    rows = []
    for b in range(most + 1):
        step_s = float(mean_s[M - b - 1])
        total = step_s * steps.steps(M - b)
        rows.append(
            BackupRow(
                backups=b,
                step_s=step_s,
                total=total / base if np.isfinite(base) else total,
                discounted_speed_up=base_s / step_s * (M - b) / M if np.isfinite(step_s) else 0.0,
            )
        )
    return BackupChoice(rows=tuple(rows), best=min(rows, key=lambda row: (row.total, row.backups)))


class BackupController:
    """`backups=auto`: chooses b again from time to time, from the round trips that it is told of.

    Late gradients count as well, so tell it of those that were dropped. A worker that is late for one step misses the next
    ones and says nothing about them; therefore the times of a step are not taken as they came, but drawn from each worker's
    own round trips. A worker that is always slow so stays visible as such.

    Args:
        num_workers: M, all of them, backups included.
        every_steps: how often b is chosen again.
        window: round trips remembered per worker.
        steps: how the number of steps depends on N.
        max_backups: the most to choose; None: M / 4, or 1.
        seed: of the draws.

    Attributes:
        backups: the b of now.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        every_steps: int = 50,
        window: int = 200,
        steps: StepsModel | None = None,
        max_backups: int | None = None,
        seed: int = 0,
    ) -> None:
        if num_workers < 1 or every_steps < 1 or window < 1:
            raise ValueError("num_workers, every_steps and window must be 1 or more")
        self.backups = 0
        self._num_workers, self._every, self._window = num_workers, every_steps, window
        self._steps, self._max, self._seed = steps or StepsModel(), max_backups, seed
        self._round_trips: dict[int, deque[float]] = {}

    def arrived(self, worker_id: int, round_trip_s: float) -> None:
        """A gradient has come, in time or late, so many seconds after the worker was given the parameters for it."""
        self._round_trips.setdefault(worker_id, deque(maxlen=self._window)).append(round_trip_s)

    def left(self, worker_id: int) -> None:
        """A worker is gone: one machine less."""
        self._round_trips.pop(worker_id, None)
        self._num_workers = max(1, self._num_workers - 1)
        self.backups = min(self.backups, self._most())

    def joined(self) -> None:
        """One machine more."""
        self._num_workers += 1

    def step_done(self, step: int) -> int:
        """To be called after every step, counted from 0; returns b for the next."""
        if (step + 1) % self._every == 0 and len(self._round_trips) == self._num_workers:
            self.backups = self.choice().best.backups
        return self.backups

    def choice(self, num_draws: int = 400) -> BackupChoice:
        """What it would choose now, and why. Workers that never sent anything are left out."""
        draws = np.random.default_rng(self._seed)
        times = [np.array(self._round_trips[worker]) for worker in sorted(self._round_trips)]
        arrivals_s = np.stack([draws.choice(one, num_draws) for one in times], axis=1) if times else np.empty((0, 0))
        return choose_backups(arrivals_s, self._steps, self._most())

    def _most(self) -> int:
        return min(max(1, self._num_workers // 4) if self._max is None else self._max, self._num_workers - 1)


def learning_rate_factor(rule: Literal["linear", "none"], num_aggregated: int) -> float:
    """What the learning rate is multiplied with when each update is the mean of N gradients: N or 1.

    Linear is the usual choice for synchronous training, with a warm-up for large N; asynchronous updates are single gradients.

    >>> learning_rate_factor("linear", 4), learning_rate_factor("none", 4)
    (4.0, 1.0)
    """
    return float(num_aggregated) if rule == "linear" else 1.0
