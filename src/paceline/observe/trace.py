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
from paceline.records.run_data import RunData, write_text

__all__ = ["write_trace"]

# Names from Chrome's own palette (catapult, color_scheme.html); Perfetto colours by name instead.
_COLOURS = {"input": "grey", "gradient": "thread_state_running", "wait": "terrible", "apply": "thread_state_iowait"}
_PROCESS_ID = 1


def write_trace(run: RunData, path: str | Path, *, max_steps_per_worker: int = 10_000, max_workers: int = 256) -> Path:
    """Write `run` as trace-event JSON.

    Costs about 800 bytes per step. Of a worker with more than `max_steps_per_worker` steps, writes the first and the last half
    of that many, complete and contiguous; `otherData.omitted` in the file, and the lane's name, say so. Of more than
    `max_workers` workers, writes the first ones; `otherData.omitted_workers` says so.

    Args:
        run: the run.
        path: the file, usually `trace.json` in the run's folder.
        max_steps_per_worker: keeps the file loadable.
        max_workers: keeps it readable.

    Returns:
        The path.
    """
    events: list[str] = [_metadata("process_name", 0, _process_name(run)), _metadata("process_sort_index", 0, 0)]
    omitted: dict[str, str] = {}
    for worker_id, records in sorted(run.records.items())[:max_workers]:
        ordered = records[np.argsort(records["started_s"], kind="stable")]
        kept, note = _shorten(ordered, max_steps_per_worker)
        lane = f"worker {worker_id}"
        if note:
            omitted[str(worker_id)] = note
            lane += f" ({note})"
        events.append(_metadata("thread_name", worker_id + 1, lane))
        events.append(_metadata("thread_sort_index", worker_id + 1, worker_id))
        events.extend(_slices(worker_id, kept))
        events.extend(_dropped(worker_id, kept))
        events.extend(_counters(worker_id, kept))
        if run.result.get("batch_sizes"):
            events.extend(_batch_sizes(worker_id, kept))
    other: dict[str, Any] = {
        "what": "Paceline run",
        "placement": "A step's record knows how long it waited and applied, not when: waiting is drawn right after the "
        "gradient, applying at the end of the step.",
        "config": {key: str(value) for key, value in run.config.items()},
        "outcome": str(run.result.get("outcome", "unknown")),
    }
    if omitted:
        other["omitted"] = omitted
    if len(run.records) > max_workers:
        other["omitted_workers"] = f"the last {len(run.records) - max_workers} of {len(run.records)}"
    write_text(
        path,
        '{"displayTimeUnit": "ms",\n"otherData": '
        + json.dumps(other)
        + ',\n"traceEvents": [\n'
        + ",\n".join(events)
        + "\n]}\n",
    )
    return Path(path)


def _process_name(run: RunData) -> str:
    said = {**run.config, **run.result}
    return f"{said.get('algorithm', 'run')} · {said.get('task', 'task unknown')} · {len(run.records)} workers"


def _shorten(ordered: np.ndarray, max_steps: int) -> tuple[np.ndarray, str]:
    if len(ordered) <= max_steps:
        return ordered, ""
    first, last = max_steps - max_steps // 2, max_steps // 2
    kept = np.concatenate([ordered[:first], ordered[len(ordered) - last :]])
    return kept, f"first {first} and last {last} of {len(ordered)} steps shown"


def _metadata(name: str, thread_id: int, value: str | int) -> str:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return json.dumps({"ph": "M", "name": name, "pid": _PROCESS_ID, "tid": thread_id, "args": {key: value}})


def _us(seconds: np.ndarray) -> list[str]:
    """Microseconds with three decimals, from whole nanoseconds: an end and the next beginning stay equal."""
    nanoseconds = np.rint(seconds * 1e9)
    fit = np.abs(nanoseconds).max(initial=0.0) < 2**63  # virtual times may be longer than 300 years
    whole = nanoseconds.astype(np.int64).tolist() if fit else map(int, nanoseconds.tolist())
    return [f"{ns // 1000}.{ns % 1000:03d}" for ns in whole]


def _slices(worker_id: int, records: np.ndarray) -> Iterator[str]:
    lane = segments(records)
    start_ns = np.rint(lane.start_s * 1e9)
    duration_us = _us((np.rint(lane.end_s * 1e9) - start_ns) / 1e9)
    rows = lane.ordered[lane.row]
    for kind, start, duration, step, batch, read, applied in zip(
        lane.kind.tolist(),
        _us(start_ns / 1e9),
        duration_us,
        rows["step"].tolist(),
        rows["batch"].tolist(),
        rows["read_version"].tolist(),
        rows["applied_version"].tolist(),
        strict=True,
    ):
        name = KINDS[kind]
        arguments = f'{{"step": {step}, "batch": {batch}, "read_version": {read}, "applied_version": {applied}}}'
        yield (
            f'{{"ph": "X", "name": "{name}", "cat": "step", "pid": {_PROCESS_ID}, "tid": {worker_id + 1}, '
            f'"ts": {start}, "dur": {duration}, "cname": "{_COLOURS[name]}", "args": {arguments}}}'
        )


def _dropped(worker_id: int, records: np.ndarray) -> Iterator[str]:
    rows = records[records["applied_version"] == -1]
    for time, step, failed in zip(
        _us(rows["ended_s"]), rows["step"].tolist(), rows["failed_publishes"].tolist(), strict=True
    ):
        yield (
            f'{{"ph": "i", "name": "gradient dropped", "cat": "step", "s": "t", "pid": {_PROCESS_ID}, '
            f'"tid": {worker_id + 1}, "ts": {time}, "args": {{"step": {step}, "failed_publishes": {failed}}}}}'
        )


def _batch_sizes(worker_id: int, records: np.ndarray) -> Iterator[str]:
    """Batch sizes that differ from the previous step's."""
    rows = records[np.flatnonzero(np.diff(records["samples"], prepend=-1))]
    for time, samples in zip(_us(rows["started_s"]), rows["samples"].tolist(), strict=True):
        yield (
            f'{{"ph": "C", "name": "batch size, worker {worker_id} (samples)", "pid": {_PROCESS_ID}, '
            f'"ts": {time}, "args": {{"samples": {samples}}}}}'
        )


def _counters(worker_id: int, records: np.ndarray) -> Iterator[str]:
    rows = records[records["applied_version"] >= 1]
    staleness = rows["applied_version"] - 1 - rows["read_version"]
    for time, stale, loss in zip(_us(rows["ended_s"]), staleness.tolist(), rows["loss"].tolist(), strict=True):
        yield (
            f'{{"ph": "C", "name": "staleness, worker {worker_id} (updates)", "pid": {_PROCESS_ID}, '
            f'"ts": {time}, "args": {{"staleness": {stale}}}}}'
        )
        if np.isfinite(loss):
            yield (
                f'{{"ph": "C", "name": "loss, worker {worker_id}", "pid": {_PROCESS_ID}, '
                f'"ts": {time}, "args": {{"loss": {loss!r}}}}}'
            )
