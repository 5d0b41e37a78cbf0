"""The figures of a report of runs: loss, accuracy, staleness, time per activity, lanes and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.compare import failed, figure, method_labels, run_labels
from paceline.observe.drawing import Figure, Panels, add_rule, log_axis, method_colour, numbers, scatter, thin
from paceline.observe.lanes import LANE_PX, MOST_LANES, Series, cut_lanes, lane_names, lanes, with_records
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.records.run_data import RunData
from paceline.records.summary import WINDOW, LossCurve, loss_curve

_MAX_POINTS = 1_200
_BATCHES_PX = 110


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
    targets = {figure({**one.run.config, **one.run.result}, "target_loss") for one in series}
    target = targets.pop() if len(targets) == 1 else None
    if target is not None and target > 0:
        add_rule(layout, f"target {target:g}", y=target)
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


def staleness(series: Sequence[Series]) -> Figure | None:
    """One histogram per run; with bins if there are more than 50 values."""
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
    shown = with_records(series)
    if not shown:
        return None
    workers_of = [sorted(worker for worker, own in run.records.items() if len(own))[:MOST_LANES] for run, *_ in shown]
    panels = Panels([label for _, label, _ in shown], [LANE_PX * len(workers) + 6 for workers in workers_of])
    for index, ((run, label, _), workers) in enumerate(zip(shown, workers_of, strict=True)):
        of_workers, names = [_shares_of(run.records[worker]) for worker in workers], lane_names(workers)
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
        "Sums over all steps of the run, dropped gradients included." + cut_lanes(series),
        columns={"series": "meta", "worker": "y", "activity": "name", "share (%)": "x"},
    )  # fmt: skip


def _shares_of(own: np.ndarray) -> dict[str, float]:
    """A worker's time by activity, in percent."""
    seconds = {
        "gradient": float((own["gradient_ended_s"] - own["gradient_started_s"]).sum()),
        **{kind: float(own[f"{kind}_s"].sum()) for kind in ("wait", "apply", "input")},
    }
    total = max(float((own["ended_s"] - own["started_s"]).sum()), sum(seconds.values())) or 1.0
    seconds["other"] = total - sum(seconds.values())
    return {kind: 100 * max(0.0, value) / total for kind, value in seconds.items()}


def sizes_of_batches(series: Sequence[Series]) -> Figure | None:
    """One line per worker, in one panel per run that has such batches."""
    shown = [one for one in series if one.run.result.get("batch_sizes")]
    if not shown:
        return None
    panels = Panels([label for _, label, _ in shown], [_BATCHES_PX] * len(shown))
    for index, (run, label, _) in enumerate(shown):
        changes = run.result["batch_sizes"]
        times_s = [0.0, *(one["elapsed_s"] for one in changes[1:]), max(run.result["wall_s"], changes[-1]["elapsed_s"])]
        for worker in range(min(len(changes[0]["sizes"]), MOST_LANES)):
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
        + cut_lanes(shown),
        columns={"series": "meta", "worker": "name", "time (s)": "x", "samples": "y"},
    )  # fmt: skip
