"""The changes of all workers' batch sizes during a run, and the ideal duration of its steps, from its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def batch_sizes(records: Mapping[int, np.ndarray]) -> list[dict[str, Any]]:
    """Each change: from which version on, when its first step ended, and every worker's samples of a step.

    Takes records of workers that make each update together. Leaves out steps without one of the workers, and steps with fewer
    samples than the first one, such as an epoch's last.
    """
    workers = sorted(records)
    applied = [records[worker][records[worker]["applied_version"] >= 1] for worker in workers]
    last = max((int(rows["applied_version"].max()) for rows in applied if len(rows)), default=0)
    sizes, ended_s = np.zeros((last + 1, len(workers)), np.int64), np.zeros(last + 1)
    for column, rows in enumerate(applied):
        sizes[rows["applied_version"], column] = rows["samples"]
        np.maximum.at(ended_s, rows["applied_version"], rows["ended_s"])
    totals, is_of_all = sizes.sum(1), sizes.all(1) & (len(workers) > 0)
    whole = np.flatnonzero(is_of_all & (totals == totals[np.argmax(is_of_all)]))
    changes = whole[np.flatnonzero(np.append(True, (np.diff(sizes[whole], axis=0) != 0).any(1)))] if len(whole) else []
    return [{"version": int(at), "elapsed_s": float(ended_s[at]), "sizes": sizes[at].tolist()} for at in changes]


def ideal_step_s(records: Mapping[int, np.ndarray]) -> float | None:
    """How long a whole step lasts without waits: its samples divided by the sum of the workers' speeds; None: unknown.

    A worker's speed is the inverse of its median time per sample, without waits.
    """
    changes = batch_sizes(records)
    if not changes:
        return None
    speed = 0.0
    for rows in records.values():
        own = rows[rows["samples"] > 0]
        work_s = own["input_s"] + own["gradient_ended_s"] - own["gradient_started_s"] + own["apply_s"]
        per_sample_s = float(np.median(work_s / own["samples"])) if len(own) else 0.0
        if per_sample_s <= 0:
            return None
        speed += 1 / per_sample_s
    return sum(changes[-1]["sizes"]) / speed
