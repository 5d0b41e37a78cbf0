"""The figures of a report, as plain data for plotly.js; colours are names (`@method-0`) that the page resolves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.compare import failed, figure, group_runs, run_labels
from paceline.observe.palette import METHODS
from paceline.observe.panels import Figure, lanes, numbers, shares, staleness
from paceline.records.run_data import RunData
from paceline.records.summary import WINDOW, LossCurve, loss_curve

__all__ = ["Figure", "figures", "log_axis", "method_colours"]

_MAX_POINTS = 1_200


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """Every figure that the runs have data for."""
    results = [run.result for run in runs]
    labels, colours = run_labels(results), method_colours(results)
    curves = [loss_curve(run.records, gossip=bool(run.result.get("gossip"))) for run in runs]
    drawn = [
        _loss(runs, labels, colours, curves, "time", "time (s)", lambda curve: curve.time_s),
        _loss(runs, labels, colours, curves, "samples", "samples", lambda curve: curve.samples),
        _accuracy(runs, labels, colours),
        staleness(runs, labels, colours),
        shares(runs, labels),
        lanes(runs, labels),
    ]
    return [one for one in drawn if one is not None and one.traces]


def method_colours(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One colour name per run: the same for runs of one method, unless there is only one method."""
    groups = group_runs(results)
    names = [""] * len(results)
    for index, group in enumerate(groups):
        for offset, member in enumerate(group.members):
            names[member] = f"@method-{(offset if len(groups) == 1 else index) % len(METHODS['light'])}"
    return names


def _thin(size: int, limit: int = _MAX_POINTS) -> np.ndarray:
    if size <= limit:
        return np.arange(size)
    return np.unique(np.linspace(0, size - 1, limit).astype(np.int64))


def _loss(
    runs: Sequence[RunData],
    labels: Sequence[str],
    colours: Sequence[str],
    curves: Sequence[LossCurve],
    name: str,
    x_title: str,
    x_of: Callable[[LossCurve], np.ndarray],
) -> Figure | None:
    traces: list[dict[str, Any]] = []
    lows, highs, clipped = [], [], False
    all_failed = all(failed(run.result) for run in runs)
    for run, label, colour, curve in zip(runs, labels, colours, curves, strict=True):
        if not len(curve.loss):
            continue
        finite = curve.average[np.isfinite(curve.average) & (curve.average > 0)]
        if len(finite):
            lows.append(float(finite.min()))
            # A diverged run would flatten all others: what it does above twice its own beginning is left out.
            clip = failed(run.result) and not all_failed
            highs.append(min(float(finite.max()), 2 * float(finite[0])) if clip else float(finite.max()))
            clipped = clipped or float(finite.max()) > highs[-1]
        for values, raw in ((curve.loss, True), (curve.average, False)):
            kept = _thin(len(values), 500 if raw else _MAX_POINTS)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers" if raw else "lines",
                    "name": f"{label}, single batches" if raw else label,
                    "legendgroup": label,
                    "showlegend": not raw,
                    "x": numbers(x_of(curve)[kept]),
                    "y": numbers(values[kept]),
                    "opacity": 0.16 if raw else 1,
                    "marker": {"color": colour, "size": 3},
                    "line": {"color": colour, "width": 2.2},
                    "hoverinfo": "skip" if raw else "all",
                    "hovertemplate": None if raw else f"%{{y:.4g}} at %{{x:,.4~g}} {_unit(x_title)}",
                }
            )
    if not traces:
        return None
    traces.sort(key=lambda trace: trace["mode"] == "lines")  # the averages above the points
    logarithmic = bool(lows) and max(highs) > 8 * min(lows)
    y_axis: dict[str, Any] = {"title": {"text": "training loss" + (" (log scale)" if logarithmic else "")}}
    if logarithmic:
        y_axis |= {"type": "log", **log_axis(min(lows), max(highs))}
    else:
        y_axis |= {"range": [0, 1.05 * max(highs)]} if clipped else {"rangemode": "tozero"}
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x_title}, "rangemode": "tozero"}, "yaxis": y_axis}
    _add_target(layout, runs, "target_loss", logarithmic=logarithmic)
    return Figure(
        f"loss-against-{name}",
        f"Training loss against {name}",
        f"Lines: mean of the last {WINDOW} batches applied; dots: single batches, at most 500 per run. "
        + ("Further left is sooner." if name == "time" else "Further left needs less data.")
        + (" Diverged runs leave the figure at the top." if clipped else ""),
        traces,
        layout,
        [("series", "name"), (x_title, "x"), ("training loss", "y")],
        legend=len(runs) > 1,
    )


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Range and ticks at 1, 2, 5 of each decade (decades only where there are many), written out as numbers."""
    low, high = max(low * 0.75, 1e-12), high * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 8)
    digits = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [digit * 10.0**decade for decade in decades[::every] for digit in digits]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return {
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _unit(axis_title: str) -> str:
    return axis_title.partition("(")[2].rstrip(")") or axis_title


def _add_target(layout: dict[str, Any], runs: Sequence[RunData], key: str, *, logarithmic: bool = False) -> None:
    targets = {figure({**run.config, **run.result}, key) for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    if target is None or target <= 0:
        return
    line = {"color": "@soft", "width": 1, "dash": "dash"}
    layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target, "line": line}]
    label = {"text": f"target {target:g}", "xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom"}
    y = math.log10(target) if logarithmic else target  # plotly's annotations want the logarithm, its shapes do not
    layout["annotations"] = [{**label, "y": y, "showarrow": False, "font": {"color": "@soft", "size": 11}}]


def _accuracy(runs: Sequence[RunData], labels: Sequence[str], colours: Sequence[str]) -> Figure | None:
    traces: list[dict[str, Any]] = []
    symbols = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
    for index, (run, label, colour) in enumerate(zip(runs, labels, colours, strict=True)):
        points = [
            (one["elapsed_s"], 100 * one["test_accuracy"])
            for one in run.evaluations
            if one.get("test_accuracy") is not None
        ]
        if not points:
            continue
        kept = [points[at] for at in _thin(len(points))]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(kept) <= 60 else "lines",
                "name": label,
                "x": numbers(np.array([x for x, _ in kept])),
                "y": numbers(np.array([y for _, y in kept])),
                "marker": {"color": colour, "size": 7, "symbol": symbols[index % len(symbols)]},
                "line": {"color": colour, "width": 2},
                "hovertemplate": "%{y:.2f} % at %{x:,.4~g} s",
            }
        )
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "time (s)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "test accuracy (%)"}},
    }
    return Figure(
        "accuracy-against-time",
        "Test accuracy against time",
        "Each mark is one evaluation on the test data. The axis does not begin at zero.",
        traces,
        layout,
        [("series", "name"), ("time (s)", "x"), ("test accuracy (%)", "y")],
        legend=len(runs) > 1,
    )
