"""Time to the target with b backup workers, from the time of a step.

A step of n workers with b backups ends with the k-th gradient, k = n - b. It is shorter than one that waits for all, but
more steps are needed, since each averages fewer gradients:

    time to target ~ steps(k) * time of a step,    steps(k) = 1 + half_efficient / k

Assumes that all workers begin a step together. In reality a late worker begins the next step late: steps with backups take a
few percent longer (3 % with 2 of 10 if a tenth of the time is an exponential tail), and more with heavy tails.

Reference: Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PUBLISHED_HALF_EFFICIENT = 411.0  # fits the steps that Chen et al. report for Inception with 50 and with 100 gradients


def steps_to_target(gradients: float, half_efficient: float = PUBLISHED_HALF_EFFICIENT) -> float:
    """The number of steps if each averages this many gradients; only ratios are meaningful.

    Args:
        gradients: k.
        half_efficient: k at which a gradient is worth half of what it is worth alone; infinity: steps fall as
            1 / k. The default is Inception's: 100 workers need little more than half as many steps as 50.
    """
    return 1 / gradients if math.isinf(half_efficient) else 1 + half_efficient / gradients


def time_to_target(step_s: np.ndarray, gradients: Sequence[int], half_efficient: float) -> np.ndarray:
    """(B,) for b = 0, 1, ...: mean times of a step (B,) times steps; relative to b = 0 if that is finite."""
    total = step_s * np.array([steps_to_target(k, half_efficient) for k in gradients])
    return total / total[0] if np.isfinite(total[0]) else total


def most_backups(workers: int, wanted: int | None = None) -> int:
    """The maximum number of backups: `wanted`, or a quarter of the workers, at least 1; 0 for one worker."""
    return min(max(1, workers // 4) if wanted is None else wanted, workers - 1)


def arrived_step_s(arrivals_s: np.ndarray, max_backups: int | None = None) -> np.ndarray:
    """(B,) for b = 0, 1, ...: the mean time of a step, from (steps, n) seconds until each worker's gradient.

    Args:
        arrivals_s: since the beginning of a step; infinity for a gradient that never arrived.
        max_backups: as for `most_backups`.

    Raises:
        ValueError: no arrivals.
    """
    if arrivals_s.ndim != 2 or not arrivals_s.size:
        raise ValueError("choosing backups needs the arrival times of at least one step and one worker")
    mean_s = np.sort(arrivals_s, axis=1).mean(axis=0)  # of the k-th arrival, at k - 1
    return mean_s[::-1][: 1 + most_backups(arrivals_s.shape[1], max_backups)]
