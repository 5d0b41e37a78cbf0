"""Figures with one panel per run: staleness, shares of time, lanes; and the figure type that all figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.segments import KINDS, segments, steady_start_s, steady_window_s
from paceline.records.run_data import RunData

__all__ = ["Figure", "axis_name", "lanes", "numbers", "panels", "shares", "staleness"]

_MAX_BARS = 2_500
_MAX_LANES = 48
_LANE_KINDS = ("gradient", "wait", "apply", "input")


@dataclass(slots=True)
class Figure:
    """One figure.

    Args:
        name: its id and the name of downloaded files.
        title: what is shown.
        note: how to read it.
        traces: plotly traces.
        layout: plotly layout without colours, fonts and margins, which the page sets.
        columns: of the CSV file: header and the trace's key that holds the values, or nothing where there are `rows`.
        height_px: height.
        legend: whether it has one.
        rows: of the CSV file, where the traces do not list them.
    """

    name: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    columns: list[tuple[str, str]]
    height_px: int = 380
    legend: bool = True
    rows: list[list[Any]] | None = None


def staleness(runs: Sequence[RunData], labels: Sequence[str], colours: Sequence[str]) -> Figure | None:
    """One histogram per run; in bins where there are more than 50 values."""
    shown = []
    for run, label, colour in zip(runs, labels, colours, strict=True):
        histogram = (run.result.get("staleness") or {}).get("histogram") or {}
        if histogram:
            values = np.array([int(value) for value in histogram])
            shown.append((label, colour, values, np.array(list(histogram.values()), dtype=np.float64)))
    if not shown:
        return None
    highest = max(int(values.max()) for _, _, values, _ in shown)
    lowest = min(0, *(int(values.min()) for _, _, values, _ in shown))
    width = max(1, math.ceil((highest - lowest + 1) / 50))
    layout, height = panels([label for label, *_ in shown], [84] * len(shown))
    traces = []
    for index, (label, colour, values, counts) in enumerate(shown):
        bins = (values - lowest) // width
        share = np.bincount(bins, weights=counts) / counts.sum() * 100
        filled = np.flatnonzero(share)
        first = lowest + filled * width
        ranges = [str(at) if width == 1 else f"{at} to {at + width - 1}" for at in first.tolist()]
        traces.append(
            {
                "type": "bar", "name": label, "yaxis": axis_name(index), "showlegend": False,
                "x": (first + (width - 1) / 2).tolist(), "y": numbers(share[filled], 4), "width": width * 0.86,
                "marker": {"color": colour, "line": {"width": 0}}, "customdata": ranges,
                "hovertemplate": "%{y:.2f} % of updates at staleness %{customdata}<extra></extra>",
            }
        )  # fmt: skip
        layout[f"yaxis{index + 1 if index else ''}"] |= {
            "title": {"text": "share (%)"},
            "nticks": 4,
            "rangemode": "tozero",
        }
    layout["xaxis"] |= {
        "title": {"text": "staleness (updates)"},
        "range": [lowest - 0.7, max(highest + width - 0.3, lowest + 8.7)],
        "showgrid": False,
    }
    if highest - lowest < 12:
        layout["xaxis"]["dtick"] = 1
    return Figure(
        "staleness",
        "How stale the applied gradients were",
        "Staleness: how many updates were applied between a gradient's reading of the parameters and its own update.",
        traces,
        layout,
        [("series", "name"), ("staleness (updates)", "customdata"), ("share of updates (%)", "y")],
        height_px=height,
        legend=False,
    )


def shares(runs: Sequence[RunData], labels: Sequence[str]) -> Figure | None:
    """One stacked bar per worker: its time by activity."""
    shown = [(run, label) for run, label in zip(runs, labels, strict=True) if any(map(len, run.records.values()))]
    if not shown:
        return None
    lanes = [sorted(worker for worker, own in run.records.items() if len(own))[:_MAX_LANES] for run, _ in shown]
    layout, height = panels([label for _, label in shown], [22 * len(workers) + 6 for workers in lanes])
    traces: list[dict[str, Any]] = []
    for index, ((run, label), workers) in enumerate(zip(shown, lanes, strict=True)):
        shares: dict[str, list[float]] = {kind: [] for kind in ACTIVITY_NAMES}
        for worker in workers:
            own = run.records[worker]
            seconds = {
                "gradient": float((own["gradient_ended_s"] - own["gradient_started_s"]).sum()),
                "wait": float(own["wait_s"].sum()),
                "apply": float(own["apply_s"].sum()),
                "input": float(own["input_s"].sum()),
            }
            total = max(float((own["ended_s"] - own["started_s"]).sum()), sum(seconds.values()), 1e-12)
            seconds["other"] = total - sum(seconds.values())
            for kind, value in seconds.items():
                shares[kind].append(100 * max(0.0, value) / total)
        for kind, values in shares.items():
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": ACTIVITY_NAMES[kind], "yaxis": axis_name(index),
                    "legendgroup": kind, "showlegend": index == 0, "x": numbers(np.array(values), 4),
                    "y": [f"worker {worker}" for worker in workers], "meta": label, "width": 0.8,
                    "marker": {"color": f"@{kind}", "line": {"width": 0}},
                    "hovertemplate": f"%{{y}}: %{{x:.1f}} % {ACTIVITY_NAMES[kind]}<extra></extra>",
                }
            )  # fmt: skip
        layout[f"yaxis{index + 1 if index else ''}"] |= {"autorange": "reversed", "showgrid": False, "ticks": ""}
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"title": {"text": "share of the worker's time (%)"}, "range": [0, 100]}
    return Figure(
        "time-per-worker",
        "Where each worker's time went",
        "Sums over all steps of the run, dropped gradients included." + _cut_lanes(runs),
        traces,
        layout,
        [("series", "meta"), ("worker", "y"), ("activity", "name"), ("share (%)", "x")],
        height_px=height,
    )


def lanes(runs: Sequence[RunData], labels: Sequence[str]) -> Figure | None:
    """One lane per worker: what it did when, over the same duration of every run."""
    shown = [(run, label) for run, label in zip(runs, labels, strict=True) if any(map(len, run.records.values()))]
    if not shown:
        return None
    num_lanes = sum(min(len(run.records), _MAX_LANES) for run, _ in shown)
    window_s = steady_window_s([run.records for run, _ in shown], max(3, min(20, _MAX_BARS // (3 * num_lanes))))
    scale, unit = (1e3, "ms") if window_s < 2 else (1.0, "s")
    layout, height = panels([label for _, label in shown], [22 * min(len(r.records), _MAX_LANES) + 6 for r, _ in shown])
    in_legend: set[str] = set()
    traces: list[dict[str, Any]] = []
    for index, (run, label) in enumerate(shown):
        begin_s = steady_start_s(run.records)
        bars: dict[str, list[tuple[float, float, str, str]]] = {kind: [] for kind in (*_LANE_KINDS, "dropped")}
        workers = sorted(run.records)[:_MAX_LANES]
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
                    bars[shown_as].append((low, high, f"worker {worker}", f"step {step['step']}, {fate}"))
        for kind, items in bars.items():
            if kind == "dropped" and not items:
                continue
            name = ACTIVITY_NAMES.get(kind, "gradient that was dropped")
            first = kind not in in_legend
            in_legend.add(kind)
            marker: dict[str, Any] = {"color": f"@{kind}", "line": {"width": 0}}
            if kind == "dropped":
                marker = {"color": "@gradient", "pattern": {"shape": "/", "fillmode": "replace", "size": 5}}
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": name, "yaxis": axis_name(index),
                    "legendgroup": kind, "showlegend": first, "meta": label, "width": 0.8,
                    "base": numbers(np.array([low * scale for low, *_ in items])),
                    "x": numbers(np.array([(high - low) * scale for low, high, *_ in items])),
                    "y": [lane_name for *_, lane_name, _ in items], "customdata": [text for *_, text in items],
                    "marker": marker,
                    "hovertemplate": f"%{{y}}, {name}: %{{x:.3~g}} {unit}"
                    "<br>%{customdata}<extra></extra>",
                }
            )  # fmt: skip
        names = [f"worker {worker}" for worker in workers]
        layout[f"yaxis{index + 1 if index else ''}"] |= {
            "type": "category", "categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.5, -0.5],
            "showgrid": False, "ticks": "",
        }  # fmt: skip
    layout["barmode"] = "overlay"
    layout["xaxis"] |= {
        "title": {"text": f"time since every worker's first step ({unit})"},
        "range": [0, window_s * scale],
    }
    return Figure(
        "lanes",
        "Who waits for whom: one lane per worker",
        "The same duration of every run. Blank: not accounted for." + _cut_lanes(runs),
        traces,
        layout,
        [
            ("series", "meta"), ("worker", "y"), ("activity", "name"), (f"start ({unit})", "base"),
            (f"duration ({unit})", "x"), ("step", "customdata"),
        ],
        height_px=height,
    )  # fmt: skip


def panels(labels: Sequence[str], sizes: Sequence[float], gap_px: float = 34) -> tuple[dict[str, Any], int]:
    """Panels below each other with one x axis and a heading each; sizes in pixels. Returns layout and height."""
    total = sum(sizes) + gap_px * len(sizes)
    layout: dict[str, Any] = {"annotations": [], "xaxis": {"anchor": "free", "position": 0}}
    top = total
    for index, (label, size) in enumerate(zip(labels, sizes, strict=True)):
        top -= gap_px
        axis = f"yaxis{index + 1 if index else ''}"
        layout[axis] = {"domain": [max(0, (top - size) / total), top / total], "anchor": "x"}
        layout["annotations"].append(
            {
                "text": f"<b>{_escape(label)}</b>", "showarrow": False, "xref": "paper", "yref": "paper", "x": 0,
                "y": top / total, "xanchor": "left", "yanchor": "bottom", "font": {"size": 12.5, "color": "@text"},
            }
        )  # fmt: skip
        top -= size
    return layout, round(total)


def _cut_lanes(runs: Sequence[RunData]) -> str:
    return f" The first {_MAX_LANES} workers are shown." if any(len(run.records) > _MAX_LANES for run in runs) else ""


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def axis_name(index: int) -> str:
    """Plotly's name of a panel's y axis."""
    return f"y{index + 1 if index else ''}"


def numbers(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Plain numbers for JSON, rounded to `digits` significant digits to keep the page small."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
