"""The timeline of a report: each worker's activities, the worker it waited for, and its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.observe.drawing import Figure, Panels, axis_name, numbers
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.segments import KINDS, segments, steady_start_s, steady_window_s
from paceline.observe.waits import Steps, waits_of
from paceline.records.run_data import RunData

Waits = tuple[Steps, np.ndarray, np.ndarray]

MOST_LANES = 48
LANE_PX = 22
_MOST_BARS = 2_500
_MOST_ROUNDS = 100
_KINDS = ("gradient", "wait", "apply", "input")
_MARKS = {  # symbol and size of each event
    "models averaged": ("diamond", 7),
    "worker died": ("x", 11),
    "worker replaced": ("triangle-right", 11),
}


class Series(NamedTuple):
    """A run with its name and colour in figures."""

    run: RunData
    label: str
    colour: str = ""


def with_records(series: Sequence[Series]) -> list[Series]:
    """The runs that recorded steps."""
    return [one for one in series if any(map(len, one.run.records.values()))]


def lane_names(workers: Sequence[int]) -> list[str]:
    """`worker 0` and so on."""
    return [f"worker {worker}" for worker in workers]


def cut_lanes(series: Sequence[Series]) -> str:
    """A sentence if there are more workers than lanes, else ""."""
    cut = any(len(one.run.records) > MOST_LANES for one in series)
    return f" The first {MOST_LANES} workers are shown." if cut else ""


def lanes(series: Sequence[Series]) -> Figure | None:
    """One lane per worker with its activities over time; the same duration for every run."""
    shown = with_records(series)
    if not shown:
        return None
    num_lanes = [min(len(run.records), MOST_LANES) for run, *_ in shown]
    window_s = steady_window_s([run.records for run, *_ in shown], max(3, min(20, _MOST_BARS // (3 * sum(num_lanes)))))
    scale, unit = (1e3, "ms") if window_s < 2 else (1.0, "s")
    panels = Panels([label for _, label, _ in shown], [LANE_PX * number + 6 for number in num_lanes])
    marked: set[str] = set()
    for index, (run, label, _) in enumerate(shown):
        workers = sorted(run.records)[:MOST_LANES]
        begin_s = _begin_s(run, window_s)
        run = _within(run, begin_s - window_s, begin_s + 2 * window_s)  # a round's end may lie beyond the window
        waits = waits_of(run)
        for kind, items in _bars(run, waits, workers, begin_s, window_s).items():
            if kind == "dropped" and not items:
                continue
            name = ACTIVITY_NAMES.get(kind, "gradient that was dropped")
            striped = {"color": "@gradient", "pattern": {"shape": "/", "fillmode": "replace", "size": 5}}
            panels.bars(
                index, kind, name, [lane for *_, lane, _ in items], [(high - low) * scale for low, high, *_ in items],
                base=numbers([low * scale for low, *_ in items]), customdata=[text for *_, text in items], meta=label,
                marker=striped if kind == "dropped" else {},
                hovertemplate=f"%{{y}}, {name}: %{{x:.3~g}} {unit}<br>%{{customdata}}<extra></extra>",
            )  # fmt: skip
        events = _events(run, workers)
        for name, (symbol, size) in _MARKS.items():
            found = [(at_s, lane) for what, at_s, lane in events if what == name and 0 <= at_s - begin_s <= window_s]
            if found:
                marked.add(name)
                panels.add(
                    index, legend=name, type="scatter", mode="markers", name=name, y=[lane for _, lane in found],
                    x=numbers([(at_s - begin_s) * scale for at_s, _ in found]), hovertemplate=f"%{{y}}: {name}<extra></extra>",
                    marker={"symbol": symbol, "size": size, "color": "@text", "line": {"width": 1, "color": "@page"}},
                )  # fmt: skip
        for at_s in _rounds_s(run, waits, begin_s, begin_s + window_s):
            marked.add("")
            x = (at_s - begin_s) * scale
            ends = {"x0": x, "x1": x, "y0": -0.5, "y1": len(workers) - 0.5, "yref": axis_name(index)}
            panels.layout["shapes"].append(
                {"type": "line", **ends, "line": {"color": "@soft", "width": 1, "dash": "dot"}}
            )
        panels.rows(index, lane_names(workers))
    panels.layout["barmode"] = "overlay"
    since = "since shortly before the first death" if "worker died" in marked else "since every worker's first step"
    panels.x |= {"title": {"text": f"time {since} ({unit})"}, "range": [0, window_s * scale]}
    notes = [
        "The same duration of every run. Blank: not accounted for.",
        "Dotted: the last worker of a round arrives." if "" in marked else "",
        "Diamonds: the preceding step averaged models." if "models averaged" in marked else "",
    ]
    return panels.figure(
        "lanes", "Who waits for whom: one lane per worker",
        " ".join(filter(None, notes)) + cut_lanes(series),
        columns={
            "series": "meta", "worker": "y", "activity": "name", f"start ({unit})": "base", f"duration ({unit})": "x",
            "step": "customdata",
        },
    )  # fmt: skip


def _begin_s(run: RunData, window_s: float) -> float:
    """After every worker's first step, or shortly before the first death."""
    begin_s = steady_start_s(run.records)
    died_s = [at_s for what, at_s, _ in _events(run, sorted(run.records)) if what == "worker died"]
    return max(begin_s, min(died_s) - window_s / 4) if died_s else begin_s


def _within(run: RunData, begin_s: float, end_s: float) -> RunData:
    is_in = {worker: (own["ended_s"] > begin_s) & (own["started_s"] < end_s) for worker, own in run.records.items()}
    return RunData(run.config, run.result, {worker: run.records[worker][which] for worker, which in is_in.items()})


def _events(run: RunData, workers: Sequence[int]) -> list[tuple[str, float, str]]:
    """Events of workers: kind, time and lane."""
    found: list[tuple[str, float, str]] = []
    lost = run.result.get("workers_lost") or []
    for worker, lane in zip(workers, lane_names(workers), strict=True):
        own = run.records[worker]
        if not len(own):
            continue
        after = np.flatnonzero(np.diff(own["incarnation"])) + 1
        died_s = [*own["ended_s"][after - 1].tolist(), *(own["ended_s"][-1:].tolist() if worker in lost else [])]
        found += [("worker died", at_s, lane) for at_s in died_s]
        found += [("worker replaced", at_s, lane) for at_s in own["started_s"][after].tolist()]
        found += [("models averaged", at_s, lane) for at_s in own["ended_s"][own["averages"] > 0].tolist()]
    return found


def _rounds_s(run: RunData, waits: Waits | None, begin_s: float, end_s: float) -> list[float]:
    """When the last worker of each round arrived, if the others wait for it and the rounds are few enough to draw."""
    if waits is None or run.result["waits_for"] not in ("everyone", "quorum"):
        return []
    _, blocker, since_s = waits
    at_s = np.unique(since_s[(blocker >= 0) & (since_s >= begin_s) & (since_s <= end_s)])
    distinct = at_s[np.diff(at_s, prepend=-np.inf) > (end_s - begin_s) / 1000]
    return distinct.tolist() if len(distinct) <= _MOST_ROUNDS else []


def _bars(
    run: RunData, waits: Waits | None, workers: Sequence[int], begin_s: float, window_s: float
) -> dict[str, list[tuple[float, float, str, str]]]:
    """By activity: start, end, worker and hover text."""
    by_speed, for_whom = bool(run.result.get("batch_sizes")), _for_whom(waits)
    bars: dict[str, list[tuple[float, float, str, str]]] = {kind: [] for kind in (*_KINDS, "dropped")}
    for worker, name in zip(workers, lane_names(workers), strict=True):
        lane = segments(run.records[worker])
        for kind, start, end, step in zip(lane.kind, lane.start_s, lane.end_s, lane.rows, strict=True):
            low, high = max(start, begin_s) - begin_s, min(end, begin_s + window_s) - begin_s
            if high > low:
                made = int(step["applied_version"])
                fate = {-1: "dropped", 0: "without a batch"}.get(made, f"made version {made}")
                shown_as = "dropped" if fate == "dropped" and KINDS[kind] == "gradient" else KINDS[kind]
                text = f"step {step['step']}, {fate}" + (f", {step['samples']} samples" if by_speed else "")
                other = for_whom.get((worker, float(step["started_s"]))) if shown_as == "wait" else None
                bars[shown_as].append((low, high, name, text + (f", for worker {other}" if other is not None else "")))
    return bars


def _for_whom(waits: Waits | None) -> dict[tuple[int, float], int]:
    """By worker and start of a step: the worker that its wait was for."""
    if waits is None:
        return {}
    steps, blocker, _ = waits
    keys = zip(steps.worker.tolist(), steps.rows["started_s"].tolist(), blocker.tolist(), strict=True)
    return {(worker, started_s): other for worker, started_s, other in keys if other >= 0}
