"""The figures of a report of runs: curves of loss and accuracy, and one panel per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.compare import failed, figure, method_labels, run_labels
from paceline.observe.drawing import Figure, add_rule, log_axis, method_colour, scatter, thin
from paceline.observe.panels import Series, lanes, shares, sizes_of_batches, staleness
from paceline.records.run_data import RunData
from paceline.records.summary import WINDOW, LossCurve, loss_curve

_MAX_POINTS = 1_200


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """Every figure that the runs have data for."""
    results = [run.result for run in runs]
    labels, colours = run_labels(results), method_colours(results)
    curves = [loss_curve(run.records, gossip=bool(run.result.get("gossip"))) for run in runs]
    series = [Series(*one) for one in zip(runs, labels, colours, strict=True)]
    drawn = [
        _loss(series, curves, "time", "s", lambda curve: curve.time_s),
        _loss(series, curves, "samples", "samples", lambda curve: curve.samples),
        _accuracy(series),
        *(draw(series) for draw in (staleness, shares, lanes, sizes_of_batches)),
    ]
    return [one for one in drawn if one is not None and one.traces]


def method_colours(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One colour name per run: the same for runs of one method, unless there is only one method."""
    methods = method_labels(results)
    distinct = list(dict.fromkeys(methods))
    return [method_colour(run if len(distinct) == 1 else distinct.index(one)) for run, one in enumerate(methods)]


def _loss(
    series: Sequence[Series], curves: Sequence[LossCurve], name: str, unit: str, x_of: Callable[[LossCurve], np.ndarray]
) -> Figure | None:
    x_title = f"{name} ({unit})" if unit != name else name
    traces: list[dict[str, Any]] = []
    lows, highs, clipped = [], [], False
    all_failed = all(failed(one.run.result) for one in series)
    for (run, label, colour), curve in zip(series, curves, strict=True):
        if not len(curve.loss):
            continue
        finite = curve.average[np.isfinite(curve.average) & (curve.average > 0)]
        if len(finite):
            lows.append(float(finite.min()))
            # A diverged run would flatten all others: values above twice its initial one are left out.
            clip = failed(run.result) and not all_failed
            highs.append(min(float(finite.max()), 2 * float(finite[0])) if clip else float(finite.max()))
            clipped = clipped or float(finite.max()) > highs[-1]
        for values, raw in ((curve.loss, True), (curve.average, False)):
            kept = thin(len(values), 500 if raw else _MAX_POINTS)
            mode, title = ("markers", f"{label}, single batches") if raw else ("lines", label)
            hover = {"hoverinfo": "skip"} if raw else {"hovertemplate": f"%{{y:.4g}} at %{{x:,.4~g}} {unit}"}
            traces.append(
                scatter(
                    mode, title, x_of(curve)[kept], values[kept], legendgroup=label, showlegend=not raw,
                    opacity=0.16 if raw else 1, marker={"color": colour, "size": 3},
                    line={"color": colour, "width": 2.2}, **hover,
                )
            )  # fmt: skip
    if not traces:
        return None
    traces.sort(key=lambda trace: trace["mode"] == "lines")  # the averages above the points
    logarithmic = bool(lows) and max(highs) > 8 * min(lows)
    y_axis: dict[str, Any] = {"title": {"text": "training loss" + (" (log scale)" if logarithmic else "")}}
    if logarithmic:
        y_axis |= log_axis(min(lows), max(highs))
    else:
        y_axis |= {"range": [0, 1.05 * max(highs)]} if clipped else {"rangemode": "tozero"}
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x_title}, "rangemode": "tozero"}, "yaxis": y_axis}
    _add_target(layout, series)
    return Figure(
        f"loss-against-{name}",
        f"Training loss against {name}",
        f"Lines: mean of the last {WINDOW} batches applied; dots: single batches, at most 500 per run. "
        + ("Further left is sooner." if name == "time" else "Further left needs less data.")
        + (" Diverged runs leave the figure at the top." if clipped else ""),
        traces,
        layout,
        columns={"series": "name", x_title: "x", "training loss": "y"},
        legend=len(series) > 1,
    )


def _add_target(layout: dict[str, Any], series: Sequence[Series]) -> None:
    targets = {figure({**one.run.config, **one.run.result}, "target_loss") for one in series}
    target = targets.pop() if len(targets) == 1 else None
    if target is not None and target > 0:
        add_rule(layout, f"target {target:g}", y=target)


def _accuracy(series: Sequence[Series]) -> Figure | None:
    traces: list[dict[str, Any]] = []
    symbols = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
    for index, (run, label, colour) in enumerate(series):
        points = [
            (one["elapsed_s"], 100 * one["test_accuracy"])
            for one in run.evaluations
            if one.get("test_accuracy") is not None
        ]
        if not points:
            continue
        x, y = zip(*(points[at] for at in thin(len(points), _MAX_POINTS)), strict=True)
        marker = {"color": colour, "size": 7, "symbol": symbols[index % len(symbols)]}
        traces.append(
            scatter(
                "lines+markers" if len(x) <= 60 else "lines", label, x, y, marker=marker, line={"color": colour, "width": 2},
                hovertemplate="%{y:.2f} % at %{x:,.4~g} s",
            )
        )  # fmt: skip
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
        columns={"series": "name", "time (s)": "x", "test accuracy (%)": "y"},
        legend=len(series) > 1,
    )
