"""When the workers' gradients were ready in each step of a run; used to choose the number of backup workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_WARM_UP_ROWS = 10  # a worker with more gradients ignores its first, which includes one-time initialisation
_FULL_SHARE = 0.9
_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class GradientTimes:
    """The workers' gradient times in a run."""

    #: (steps, workers) from a step's beginning to each gradient, plus the time from the last needed gradient to the next step.
    times_s: np.ndarray
    as_they_came: bool  # whether each row is a step of the run; else rows combine draws from each worker's own times
    updates: int
    gradients_per_update: float  # mean number of gradients in an update

    @property
    def num_workers(self) -> int:
        """Number of workers, with backups."""
        return self.times_s.shape[1]


def gradient_times(records: Mapping[int, np.ndarray]) -> GradientTimes | None:
    """The times of a run's workers; None if no worker has computed a gradient.

    Uses the steps of the run if all workers took part in (nearly) all of them. Otherwise, as with backup workers or without
    common steps, draws from each worker's own times.
    """
    workers = [rows[1:] if len(rows) > _WARM_UP_ROWS else rows for rows in records.values() if len(rows)]
    if not workers:
        return None
    rows = np.concatenate(workers)
    applied = rows[rows["applied_version"] >= 1]
    _, update, sizes = np.unique(applied["applied_version"], return_inverse=True, return_counts=True)
    rest_s = _rest_s(applied, update, len(sizes))
    steps = times_s = _whole_steps(workers)
    if times_s is None:
        draws = np.random.default_rng(0)
        own = [one["input_s"] + one["gradient_ended_s"] - one["gradient_started_s"] for one in workers]
        times_s = np.stack([draws.choice(times, _DRAWS) for times in own], axis=1)
    versions = np.concatenate([one["applied_version"] for one in records.values()])
    versions = versions[versions >= 1]
    updates = len(np.unique(versions))
    return GradientTimes(times_s + rest_s, steps is not None, updates, len(versions) / max(1, updates))


def _rest_s(applied: np.ndarray, update: np.ndarray, num_updates: int) -> float:
    """Median time from the last gradient of an update until the first of its workers resumes."""
    if not num_updates:
        return 0.0
    ready_s, on_s = np.full(num_updates, -np.inf), np.full(num_updates, np.inf)
    np.maximum.at(ready_s, update, applied["gradient_ended_s"])
    np.minimum.at(on_s, update, applied["ended_s"])
    return max(0.0, float(np.median(on_s - ready_s)))


def _whole_steps(workers: list[np.ndarray]) -> np.ndarray | None:
    """(steps, workers) of the steps in which all workers took part; None if these are not nearly all steps."""
    rows = np.concatenate(workers)
    of_worker = np.repeat(np.arange(len(workers)), [len(one) for one in workers])
    versions, step, sizes = np.unique(rows["read_version"], return_inverse=True, return_counts=True)
    whole = sizes == len(workers)
    if len(workers) == 1 or whole.sum() < _FULL_SHARE * len(versions):
        return None
    times_s = np.full((len(versions), len(workers)), np.nan)
    times_s[step, of_worker] = rows["gradient_ended_s"]
    begun_s = np.full(len(versions), np.inf)
    np.minimum.at(begun_s, step, rows["started_s"])
    times_s = (times_s - begun_s[:, None])[whole]
    return times_s if np.isfinite(times_s).all() else None
