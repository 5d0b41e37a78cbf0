"""From step records to figures: staleness, throughput, waiting, time to a loss. Pure functions of arrays.

Two words are used throughout. *Applied order* sorts the gradients that were applied by the version they made (several
workers of a lockstep method share one version; they are then sorted by their time). The *running loss* at a place in
that order is the mean of the last 100 losses up to it, fewer at the beginning; gradients without a loss are skipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.records.step_record import RECORD_DTYPE, begin_at_zero, last_s

FRACTIONS = ("0.75", "0.5", "0.25", "0.1", "0.05", "0.025")
WINDOW = 100
NO_UPDATE = "All workers have ended without an update: check that loops have batches and call optimizer.step()."


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The running loss along a run; all arrays have one entry per applied gradient that reported a loss."""

    time_s: np.ndarray  # when this gradient and all before it in applied order were done
    steps: np.ndarray  # updates applied until then
    samples: np.ndarray  # samples of the gradients applied until then
    loss: np.ndarray  # the batch's own loss
    average: np.ndarray  # the running loss


def applied_in_order(records: Mapping[int, np.ndarray], *, gossip: bool = False) -> np.ndarray:
    """All records whose gradient was applied, in applied order; by time if every worker counts its own versions."""
    return _in_order(_concatenate(records), gossip=gossip)


def _in_order(rows: np.ndarray, *, gossip: bool) -> np.ndarray:
    rows = rows[rows["applied_version"] >= 1]
    if gossip:
        return rows[np.argsort(rows["ended_s"], kind="stable")]
    return rows[np.lexsort((rows["ended_s"], rows["applied_version"]))]


def running_average(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean of the last `window` values at each place, or of all so far if there are fewer.

    Differences of one cumulative sum would let a single huge loss spoil all later averages, so every window is summed.
    """
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        first = np.cumsum(values[: window - 1]) / np.arange(1, min(len(values), window - 1) + 1)
        if len(values) < window:
            return first
        return np.concatenate([first, np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)])


def loss_curve(records: Mapping[int, np.ndarray], *, gossip: bool = False) -> LossCurve:
    """The running loss of a run against time, steps and samples."""
    return _curve(applied_in_order(records, gossip=gossip), gossip=gossip)


def _curve(applied: np.ndarray, *, gossip: bool) -> LossCurve:
    # Workers end out of applied order: an average over versions up to k exists once all of them are done.
    time_s = np.maximum.accumulate(applied["ended_s"])
    steps = np.arange(1, len(applied) + 1)
    if not gossip:  # several gradients may have made one update
        steps = np.cumsum(np.diff(applied["applied_version"], prepend=0) != 0)
    samples = np.cumsum(applied["samples"])
    reported = ~np.isnan(applied["loss"])
    loss = applied["loss"][reported]
    return LossCurve(time_s[reported], steps[reported], samples[reported], loss, running_average(loss))


def summarize(
    records: Mapping[int, np.ndarray],
    *,
    num_workers: int,
    wall_s: float,
    initial_loss: float | None = None,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    lockstep: bool = False,
    gossip: bool = False,
) -> dict[str, Any]:
    """Every figure of `result.json` that follows from the records and evaluations.

    Costs about two seconds per million records. A figure that has no value (no records, no loss reported,
    target not reached) is None.

    Args:
        records: worker_id -> `RECORD_DTYPE` array, times in seconds from the run's start.
        num_workers: workers of the run; lists per worker have at least this many entries.
        wall_s: duration of the training.
        initial_loss: loss before the first update; `time_to_fraction_s` counts in fractions of it.
        target_loss: a running loss at or below it is the target.
        target_accuracy: an evaluation at or above it is the target; with both, the earlier one counts.
        evaluations: as in `RunData`.
        lockstep: all workers make one update together: a step is a distinct version.
        gossip: every worker has its own model: `steps` counts the gradients applied by all of them, and a gradient's
            staleness is on its worker's own model.

    Returns:
        `steps`, `samples`, `samples_per_s`, `train_loss`, `test_loss`, `test_accuracy`, `time_to_target_s`,
        `steps_to_target`, `time_to_fraction_s`, `staleness` (`mean`, `p50`, `p95`, `max`, `histogram`,
        `mean_after_gradient`), `gradients_per_update` (how many updates were made of so many gradients, where workers make
        them together), `updates_per_worker`, `waiting_share`, `waiting_share_per_worker`, `compute_share`,
        `input_share`, `apply_share`, `failed_publishes`, `dropped_updates`, `computed_gradients`, `share_of_updates`,
        `averages_per_step`, `messages_per_step`, `bytes_per_step`, `peer_failures`, `bits_per_element`, `codec_share` and
        `wall_s`. "Per step" is per computed gradient of one worker; an average counts at every worker that takes part in it,
        so that a pair's counts twice.
    """
    rows = _concatenate(records)
    applied = rows[rows["applied_version"] >= 1]
    curve = _curve(_in_order(rows, gossip=gossip), gossip=gossip)
    time_to_target_s, steps_to_target = _target(curve, target_loss, target_accuracy, evaluations)
    samples = int(applied["samples"].sum())
    size = max([num_workers, *(worker_id + 1 for worker_id in records)])
    per_worker = [records.get(worker_id, np.empty(0, RECORD_DTYPE)) for worker_id in range(size)]
    updates = [int(np.count_nonzero(own["applied_version"] >= 1)) for own in per_worker]
    return {
        "steps": len(applied) if gossip else len(np.unique(applied["applied_version"])),
        "samples": samples,
        "wall_s": float(wall_s),
        "samples_per_s": samples / wall_s if wall_s > 0 else None,
        "train_loss": _finite(curve.average[-1]) if len(curve.average) else None,
        "test_loss": _last(evaluations, "test_loss"),
        "test_accuracy": _last(evaluations, "test_accuracy"),
        "time_to_target_s": time_to_target_s,
        "steps_to_target": steps_to_target,
        "time_to_fraction_s": _time_to_fractions(curve, initial_loss),
        "staleness": _staleness(applied),
        "gradients_per_update": _gradients_per_update(applied) if lockstep else None,
        "updates_per_worker": updates,
        "waiting_share": _share(rows, rows["wait_s"]),
        "waiting_share_per_worker": [_share(own, own["wait_s"]) for own in per_worker],
        "compute_share": _share(rows, rows["gradient_ended_s"] - rows["gradient_started_s"]),
        "input_share": _share(rows, rows["input_s"]),
        "apply_share": _share(rows, rows["apply_s"]),
        "failed_publishes": int(rows["failed_publishes"].sum()),
        "dropped_updates": int((rows["applied_version"] == -1).sum()),
        "computed_gradients": int(np.count_nonzero(rows["samples"])),
        "share_of_updates": [one / max(1, len(applied)) for one in updates],
        "averages_per_step": _per_step(rows, "averages"),
        "messages_per_step": _per_step(rows, "messages"),
        "bytes_per_step": _per_step(rows, "sent_bytes"),
        "peer_failures": int(rows["peer_failures"].sum()),
        "bits_per_element": _bits_per_element(rows),
        "codec_share": _share(rows, rows["codec_s"]) if rows["coded_elements"].any() else None,
    }


def unrecorded(
    records: Mapping[int, np.ndarray],
    version: int,
    *,
    first: int = 0,
    waits: bool = False,
    undone: Sequence[tuple[int, int]] = (),
) -> int:
    """How many updates have no record: a worker may die between an update and its record.

    Args:
        records: worker_id -> all records since version `first`, of one vector that all workers share; gradients that still
            wait have the versions that they would make.
        version: the run's current one.
        first: version before the first of these updates.
        waits: gradients may be applied later than they come; every one that comes counts as a version.
        undone: first and last versions of updates that a server's death undid, whose workers sent them again.
    """
    rows = _concatenate(records)
    rows = rows[rows["applied_version"] >= 1]
    if waits:
        come = np.unique(rows[["applied_version", "gradient_version"]])
        return max(0, version - first - len(come) - sum(last - begin + 1 for begin, last in undone))
    known = [rows["applied_version"], *(np.arange(begin, last + 1) for begin, last in undone)]
    versions = np.unique(np.concatenate(known))
    return version - first - int(np.count_nonzero((versions > first) & (versions <= version)))


def repeated_batches(records: Mapping[int, np.ndarray]) -> int:
    """How many times a batch was trained on again."""
    rows = _concatenate(records)
    batches = rows["batch"][(rows["applied_version"] >= 1) & (rows["batch"] >= 0)]
    return len(batches) - len(np.unique(batches))


def _concatenate(records: Mapping[int, np.ndarray]) -> np.ndarray:
    arrays = [*(records[worker_id] for worker_id in sorted(records)), np.empty(0, RECORD_DTYPE)]
    return np.concatenate(arrays, dtype=RECORD_DTYPE)  # NumPy is slow to find it


def _first(reached: np.ndarray) -> int | None:
    at = int(reached.argmax()) if len(reached) else 0
    return at if len(reached) and reached[at] else None


def _target(
    curve: LossCurve,
    target_loss: float | None,
    target_accuracy: float | None,
    evaluations: Sequence[Mapping[str, Any]],
) -> tuple[float | None, int | None]:
    reached: list[tuple[float, int]] = []
    if target_loss is not None and (at := _first(curve.average <= target_loss)) is not None:
        reached.append((float(curve.time_s[at]), int(curve.steps[at])))
    if target_accuracy is not None:
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation["elapsed_s"]):
            accuracy = evaluation.get("test_accuracy")
            if accuracy is not None and accuracy >= target_accuracy:
                reached.append((float(evaluation["elapsed_s"]), int(evaluation["version"])))
                break
    return min(reached, default=(None, None))


def _time_to_fractions(curve: LossCurve, initial_loss: float | None) -> dict[str, float | None]:
    times: dict[str, float | None] = dict.fromkeys(FRACTIONS)
    if initial_loss is not None and math.isfinite(initial_loss):
        for fraction in FRACTIONS:
            at = _first(curve.average <= float(fraction) * initial_loss)
            times[fraction] = None if at is None else float(curve.time_s[at])
    return times


def _gradients_per_update(applied: np.ndarray) -> dict[str, int]:
    """Number of updates, by how many gradients an update applied."""
    _, sizes = np.unique(applied["applied_version"][applied["samples"] > 0], return_counts=True)
    return {str(number): count for number, count in sorted(Counter(sizes.tolist()).items())}


def _staleness(applied: np.ndarray) -> dict[str, Any]:
    if not len(applied):
        return {"mean": None, "p50": None, "p95": None, "max": None, "histogram": {}, "mean_after_gradient": None}
    before = applied["applied_version"] - 1
    staleness = before - applied["read_version"]
    after_gradient = before - applied["gradient_version"]
    values, counts = np.unique(staleness, return_counts=True)
    p50, p95 = np.percentile(staleness, [50, 95], method="inverted_cdf")  # values that occurred, not between two
    return {
        "mean": float(staleness.mean()),
        "p50": int(p50),
        "p95": int(p95),
        "max": int(values[-1]),
        "histogram": {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)},
        "mean_after_gradient": float(after_gradient.mean()),
    }


def _share(rows: np.ndarray, seconds: np.ndarray) -> float | None:
    total_s = float((rows["ended_s"] - rows["started_s"]).sum())
    return float(seconds.sum()) / total_s if total_s > 0 else None


def _per_step(rows: np.ndarray, column: str) -> float | None:
    computed = np.count_nonzero(rows["samples"])
    return float(rows[column].sum()) / computed if computed else None


def _bits_per_element(rows: np.ndarray) -> float | None:
    elements = int(rows["coded_elements"].sum())
    return 8 * int(rows["coded_bytes"].sum()) / elements if elements else None


def _last(evaluations: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((_finite(float(one[key])) for one in reversed(evaluations) if one.get(key) is not None), None)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def own_figures(records: np.ndarray, unresolved_exchanges: int, *, gossip: bool) -> dict[str, Any]:
    """The figures of a worker's own records, on the time of its first step, as `result.json` names them."""
    own = {0: records.copy()}
    begin_at_zero(own)
    figures = summarize(own, num_workers=1, wall_s=last_s(own), gossip=gossip)
    return {**figures, "unresolved_exchanges": unresolved_exchanges}
