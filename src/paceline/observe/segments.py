"""Step records laid out as intervals along each worker's lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = ("input", "gradient", "wait", "apply")


@dataclass(frozen=True, slots=True)
class Segments:
    """Intervals of one worker in order of time; they never overlap. All arrays have one entry per interval."""

    kind: np.ndarray  # index into `KINDS`
    start_s: np.ndarray
    end_s: np.ndarray
    rows: np.ndarray  # the record that each interval belongs to


def segments(records: np.ndarray) -> Segments:
    """Lay one worker's records out as intervals.

    A record has the times of its gradient, but only the *durations* of waiting, applying and preparing input. Input comes
    first, applying last, and waiting right after the gradient; durations that do not fit there are placed before it.
    """
    ordered = records[np.argsort(records["started_s"], kind="stable")]
    started = ordered["started_s"].copy()
    if len(ordered):  # overlapping steps would hide each other, so a step begins after the previous one
        started[1:] = np.maximum(started[1:], np.maximum.accumulate(ordered["ended_s"])[:-1])
    ended = np.maximum(ordered["ended_s"], started)
    gradient_started = np.clip(ordered["gradient_started_s"], started, ended)
    gradient_ended = np.clip(ordered["gradient_ended_s"], gradient_started, ended)
    room_before = gradient_started - started
    room_after = ended - gradient_ended

    input_s = np.clip(ordered["input_s"], 0, room_before)
    apply_after = np.clip(ordered["apply_s"], 0, room_after)
    wait_after = np.clip(ordered["wait_s"], 0, room_after - apply_after)
    wait_before = np.clip(ordered["wait_s"] - wait_after, 0, room_before - input_s)
    apply_before = np.clip(ordered["apply_s"] - apply_after, 0, room_before - input_s - wait_before)

    waited = started + input_s + wait_before
    pieces = (
        (0, started, started + input_s),
        (2, started + input_s, waited),
        (3, waited, waited + apply_before),
        (1, gradient_started, gradient_ended),
        (2, gradient_ended, gradient_ended + wait_after),
        (3, ended - apply_after, ended),
    )
    kind = np.stack([np.full(len(ordered), kind) for kind, _, _ in pieces], axis=1).ravel()
    start_s = np.stack([start for _, start, _ in pieces], axis=1).ravel()
    end_s = np.stack([end for _, _, end in pieces], axis=1).ravel()
    start_s[1:] = np.maximum(start_s[1:], np.maximum.accumulate(end_s)[:-1])  # rounding: an ulp of overlap
    kept = end_s > start_s
    return Segments(kind[kept], start_s[kept], end_s[kept], np.repeat(ordered, len(pieces))[kept])


def steady_start_s(records: Mapping[int, np.ndarray]) -> float:
    """When every worker has finished its first step, which cold caches and lazy initialisation make slow.

    In a run that is too short for that, its beginning.
    """
    lanes = [own for own in records.values() if len(own)]
    if not lanes:
        return 0.0
    warm_s = max(float(own["ended_s"].min()) for own in lanes)
    end_s = max(float(own["ended_s"].max()) for own in lanes)
    begin_s = min(float(own["started_s"].min()) for own in lanes)
    return warm_s if warm_s - begin_s < (end_s - begin_s) / 2 else begin_s


def steady_window_s(runs: Sequence[Mapping[int, np.ndarray]], steps: int) -> float:
    """A duration to draw for all runs: about `steps` steps of the fastest worker.

    Up to three times longer to show two steps of the slowest worker.
    """
    times_s = (own["ended_s"] - own["started_s"] for records in runs for own in records.values() if len(own))
    medians_s = [float(np.median(one)) for one in times_s]
    if not medians_s:
        return 0.0
    return min(max(steps * min(medians_s), 2.5 * max(medians_s)), 3 * steps * min(medians_s))
