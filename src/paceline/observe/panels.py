"""Figures with one panel per run: staleness, shares of time, lanes, batch sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.observe.drawing import Figure, Panels, method_colour, numbers
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.segments import KINDS, segments, steady_start_s, steady_window_s
from paceline.records.run_data import RunData

_MAX_BARS = 2_500
_MAX_LANES = 48
_LANE_PX = 22
_BATCHES_PX = 110
_LANE_KINDS = ("gradient", "wait", "apply", "input")


class Series(NamedTuple):
    """A run with its name and colour in figures."""

    run: RunData
    label: str
    colour: str = ""


def staleness(series: Sequence[Series]) -> Figure | None:
    """One histogram per run; in bins where there are more than 50 values."""
    found = [(one, (one.run.result.get("staleness") or {}).get("histogram") or {}) for one in series]
    shown = [(one, {int(value): count for value, count in histogram.items()}) for one, histogram in found if histogram]
    if not shown:
        return None
    lowest = min(0, *(min(histogram) for _, histogram in shown))
    highest = max(max(histogram) for _, histogram in shown)
    width = max(1, math.ceil((highest - lowest + 1) / 50))
    panels = Panels([one.label for one, _ in shown], [84] * len(shown))
    for index, (one, histogram) in enumerate(shown):
        panels.add(
            index, type="histogram", name=one.label, x=list(histogram), y=list(histogram.values()),
            histfunc="sum", histnorm="percent", xbins={"start": lowest - 0.5, "size": width}, autobinx=False,
            marker={"color": one.colour, "line": {"width": 0}},
            hovertemplate="%{y:.2f} % of updates at staleness %{x}<extra></extra>",
        )  # fmt: skip
        panels.y(index, title={"text": "share (%)"}, nticks=4, rangemode="tozero")
    reach = [lowest - 0.7, max(highest + width - 0.3, lowest + 8.7)]
    panels.x |= {"title": {"text": "staleness (updates)"}, "range": reach, "showgrid": False}
    panels.layout["bargap"] = 0.14
    if highest - lowest < 12:
        panels.x["dtick"] = 1
    return panels.figure(
        "staleness", "How stale the applied gradients were",
        "Staleness: how many updates were applied between a gradient's reading of the parameters and its own update.",
        columns={"series": "name", "staleness (updates)": "x", "updates": "y"}, legend=False,
    )  # fmt: skip


def shares(series: Sequence[Series]) -> Figure | None:
    """One stacked bar per worker: its time by activity."""
    shown = _with_records(series)
    if not shown:
        return None
    lanes = [sorted(worker for worker, own in run.records.items() if len(own))[:_MAX_LANES] for run, *_ in shown]
    panels = Panels([label for _, label, _ in shown], [_LANE_PX * len(workers) + 6 for workers in lanes])
    for index, ((run, label, _), workers) in enumerate(zip(shown, lanes, strict=True)):
        of_workers, names = [_shares_of(run.records[worker]) for worker in workers], _lane_names(workers)
        for kind, name in ACTIVITY_NAMES.items():
            panels.bars(
                index, kind, name, names, [one[kind] for one in of_workers], meta=label,
                hovertemplate=f"%{{y}}: %{{x:.1f}} % {name}<extra></extra>",
            )  # fmt: skip
        panels.rows(index, names)
    panels.layout["barmode"] = "stack"
    panels.x |= {"title": {"text": "share of the worker's time (%)"}, "range": [0, 100]}
    return panels.figure(
        "time-per-worker", "Where each worker's time went",
        "Sums over all steps of the run, dropped gradients included." + _cut_lanes(series),
        columns={"series": "meta", "worker": "y", "activity": "name", "share (%)": "x"},
    )  # fmt: skip


def _lane_names(workers: Sequence[int]) -> list[str]:
    return [f"worker {worker}" for worker in workers]


def _shares_of(own: np.ndarray) -> dict[str, float]:
    """A worker's time by activity, in percent."""
    seconds = {
        "gradient": float((own["gradient_ended_s"] - own["gradient_started_s"]).sum()),
        **{kind: float(own[f"{kind}_s"].sum()) for kind in ("wait", "apply", "input")},
    }
    total = max(float((own["ended_s"] - own["started_s"]).sum()), sum(seconds.values())) or 1.0
    seconds["other"] = total - sum(seconds.values())
    return {kind: 100 * max(0.0, value) / total for kind, value in seconds.items()}


def lanes(series: Sequence[Series]) -> Figure | None:
    """One lane per worker with its activities over time; the same duration for every run."""
    shown = _with_records(series)
    if not shown:
        return None
    num_lanes = [min(len(run.records), _MAX_LANES) for run, *_ in shown]
    window_s = steady_window_s([run.records for run, *_ in shown], max(3, min(20, _MAX_BARS // (3 * sum(num_lanes)))))
    scale, unit = (1e3, "ms") if window_s < 2 else (1.0, "s")
    panels = Panels([label for _, label, _ in shown], [_LANE_PX * number + 6 for number in num_lanes])
    for index, (run, label, _) in enumerate(shown):
        workers = sorted(run.records)[:_MAX_LANES]
        for kind, items in _bars(run, workers, window_s).items():
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
        panels.rows(index, _lane_names(workers))
    panels.layout["barmode"] = "overlay"
    panels.x |= {"title": {"text": f"time since every worker's first step ({unit})"}, "range": [0, window_s * scale]}
    return panels.figure(
        "lanes", "Who waits for whom: one lane per worker",
        "The same duration of every run. Blank: not accounted for." + _cut_lanes(series),
        columns={
            "series": "meta", "worker": "y", "activity": "name", f"start ({unit})": "base", f"duration ({unit})": "x",
            "step": "customdata",
        },
    )  # fmt: skip


def _bars(run: RunData, workers: Sequence[int], window_s: float) -> dict[str, list[tuple[float, float, str, str]]]:
    """By activity: start, end, worker and hover text."""
    begin_s, by_speed = steady_start_s(run.records), bool(run.result.get("batch_sizes"))
    bars: dict[str, list[tuple[float, float, str, str]]] = {kind: [] for kind in (*_LANE_KINDS, "dropped")}
    for worker in workers:
        own = run.records[worker]
        lane = segments(own[(own["ended_s"] > begin_s) & (own["started_s"] < begin_s + window_s)])
        for kind, start, end, row in zip(lane.kind, lane.start_s, lane.end_s, lane.row, strict=True):
            low, high = max(start, begin_s) - begin_s, min(end, begin_s + window_s) - begin_s
            if high > low:
                step = lane.ordered[row]
                made = int(step["applied_version"])
                fate = {-1: "dropped", 0: "without a batch"}.get(made, f"made version {made}")
                shown_as = "dropped" if fate == "dropped" and KINDS[kind] == "gradient" else KINDS[kind]
                bars[shown_as].append(
                    (
                        low,
                        high,
                        f"worker {worker}",
                        f"step {step['step']}, {fate}" + (f", {step['samples']} samples" if by_speed else ""),
                    )
                )
    return bars


def sizes_of_batches(series: Sequence[Series]) -> Figure | None:
    """One line per worker, in one panel per run that has such batches."""
    shown = [one for one in series if one.run.result.get("batch_sizes")]
    if not shown:
        return None
    panels = Panels([label for _, label, _ in shown], [_BATCHES_PX] * len(shown))
    for index, (run, label, _) in enumerate(shown):
        changes = run.result["batch_sizes"]
        times_s = [0.0, *(one["elapsed_s"] for one in changes[1:]), max(run.result["wall_s"], changes[-1]["elapsed_s"])]
        for worker in range(min(len(changes[0]["sizes"]), _MAX_LANES)):
            sizes = [one["sizes"][worker] for one in changes]
            panels.add(
                index, legend=f"worker {worker}", type="scatter", mode="lines", name=f"worker {worker}", meta=label,
                x=numbers(times_s), y=[*sizes, sizes[-1]], line={"shape": "hv", "color": method_colour(worker)},
                hovertemplate="%{y} samples<extra>%{fullData.name}</extra>",
            )  # fmt: skip
        panels.y(index, title={"text": "samples"}, nticks=4, rangemode="tozero")
    panels.x["title"] = {"text": "time (s)"}
    return panels.figure(
        "batch-sizes", "How large each worker's batch was",
        "Samples of a round, dealt out by the workers' measured speeds; short rounds at the ends of epochs are left out."
        + _cut_lanes(shown),
        columns={"series": "meta", "worker": "name", "time (s)": "x", "samples": "y"},
    )  # fmt: skip


def _with_records(series: Sequence[Series]) -> list[Series]:
    return [one for one in series if any(map(len, one.run.records.values()))]


def _cut_lanes(series: Sequence[Series]) -> str:
    cut = any(len(one.run.records) > _MAX_LANES for one in series)
    return f" The first {_MAX_LANES} workers are shown." if cut else ""
