"""A run as a Chrome trace: open it at https://ui.perfetto.dev or in chrome://tracing.

One process, one lane per worker with the slices of `segments`, an instant event for every dropped gradient, and
counters for staleness and loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.segments import KINDS, segments
from paceline.records.run_data import RunData
from paceline.system.files import write_text

_MOST_STEPS, _MOST_STEPS_IN_ALL = 10_000, 50_000
_MOST_WORKERS = 256  # no viewer shows thousands of lanes
# Names from Chrome's own palette (catapult, color_scheme.html); Perfetto colours by name instead.
_COLOURS = {"input": "grey", "gradient": "thread_state_running", "wait": "terrible", "apply": "thread_state_iowait"}


def write_trace(run: RunData, path: str | Path) -> Path:
    """Write `run` as trace-event JSON; about 800 bytes per step, 40 MB at most.

    Writes at most 10,000 steps of a worker and 50,000 in all, half from the beginning of a lane and half from its end; the
    lane's name and `otherData.omitted` say so. Writes the first 256 workers (`otherData.omitted_workers`).
    """
    shown = sorted(run.records.items())[:_MOST_WORKERS]
    most_steps = min(_MOST_STEPS, _MOST_STEPS_IN_ALL // max(1, len(shown)))
    said = {**run.config, **run.result}
    name = f"{said.get('algorithm', 'run')} · {said.get('task', 'task unknown')} · {len(run.records)} workers"
    events = [_metadata("process_name", 0, name), _metadata("process_sort_index", 0, 0)]
    omitted: dict[str, str] = {}
    for worker_id, records in shown:
        ordered = records[np.argsort(records["started_s"], kind="stable")]
        kept, note = _shorten(ordered, most_steps)
        lane = f"worker {worker_id}"
        if note:
            omitted[str(worker_id)] = note
            lane += f" ({note})"
        events.append(_metadata("thread_name", worker_id + 1, lane))
        events.append(_metadata("thread_sort_index", worker_id + 1, worker_id))
        events.extend({"tid": worker_id + 1, **event} for event in (*_slices(kept), *_dropped(kept)))
        events.extend(_counters(worker_id, kept))
        if run.result.get("batch_sizes"):
            sizes = kept[np.flatnonzero(np.diff(kept["samples"], prepend=-1))]
            name = f"batch size, worker {worker_id} (samples)"
            events.extend(_counter(name, sizes["started_s"], "samples", sizes["samples"]))
    other: dict[str, Any] = {
        "what": "Paceline run",
        "placement": "A step's record knows how long it waited and applied, not when: waiting is drawn right after the "
        "gradient, applying at the end of the step.",
        "config": {key: str(value) for key, value in run.config.items()},
        "outcome": str(run.result.get("outcome", "unknown")),
    }
    if omitted:
        other["omitted"] = omitted
    if len(run.records) > len(shown):
        other["omitted_workers"] = f"the last {len(run.records) - len(shown)} of {len(run.records)}"
    trace = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [{"pid": 1, **event} for event in events]}
    write_text(Path(path), json.dumps(trace) + "\n")
    return Path(path)


def _shorten(ordered: np.ndarray, max_steps: int) -> tuple[np.ndarray, str]:
    if len(ordered) <= max_steps:
        return ordered, ""
    first, last = max_steps - max_steps // 2, max_steps // 2
    kept = np.concatenate([ordered[:first], ordered[len(ordered) - last :]])
    return kept, f"first {first} and last {last} of {len(ordered)} steps shown"


def _metadata(name: str, thread_id: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"ph": "M", "name": name, "tid": thread_id, "args": {key: value}}


def _counter(name: str, times_s: np.ndarray, key: str, values: np.ndarray) -> Iterator[dict[str, Any]]:
    for time, value in zip(_us(times_s), values.tolist(), strict=True):
        yield {"ph": "C", "name": name, "ts": time, "args": {key: value}}


def _us(seconds: np.ndarray) -> list[float]:
    """Microseconds, rounded to nanoseconds, so that an end and the next beginning stay equal."""
    return (np.rint(seconds * 1e9) / 1e3).tolist()


def _slices(records: np.ndarray) -> Iterator[dict[str, Any]]:
    lane = segments(records)
    start_ns = np.rint(lane.start_s * 1e9)
    durations = _us((np.rint(lane.end_s * 1e9) - start_ns) / 1e9)
    names = ["step", "batch", "read_version", "applied_version"]
    rows = lane.rows[names].tolist()
    for kind, start, duration, row in zip(lane.kind.tolist(), _us(start_ns / 1e9), durations, rows, strict=True):
        name = KINDS[kind]
        yield {
            "ph": "X", "name": name, "cat": "step", "ts": start, "dur": duration, "cname": _COLOURS[name],
            "args": dict(zip(names, row, strict=True)),
        }  # fmt: skip


def _dropped(records: np.ndarray) -> Iterator[dict[str, Any]]:
    rows = records[records["applied_version"] == -1]
    for time, (step, failed) in zip(_us(rows["ended_s"]), rows[["step", "failed_publishes"]].tolist(), strict=True):
        arguments = {"step": step, "failed_publishes": failed}
        yield {"ph": "i", "name": "gradient dropped", "cat": "step", "s": "t", "ts": time, "args": arguments}


def _counters(worker_id: int, records: np.ndarray) -> Iterator[dict[str, Any]]:
    rows = records[records["applied_version"] >= 1]
    staleness = rows["applied_version"] - 1 - rows["read_version"]
    yield from _counter(f"staleness, worker {worker_id} (updates)", rows["ended_s"], "staleness", staleness)
    known = rows[np.isfinite(rows["loss"])]
    yield from _counter(f"loss, worker {worker_id}", known["ended_s"], "loss", known["loss"])
