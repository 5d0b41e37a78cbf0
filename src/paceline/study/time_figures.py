"""Figures of time: boxes of time and updates to the target, and which share of runs had arrived by when."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.observe.figures import log_axis
from paceline.observe.panels import Figure, axis_name, numbers, panels
from paceline.study.statistics import arrivals, median_estimate
from paceline.study.trials import Measure
from paceline.study.view import Drawn, View, estimate_text, level_name

__all__ = ["arrival_figure", "box_figure"]

_PANEL_PX = 190
_MOST_CURVE_PANELS = 4


def box_figure(view: View, measure: Measure) -> Drawn | None:
    """One box per method at every level; runs that never arrived count as later than all."""
    values = view.trials.values(measure.column)
    if np.isnan(values).all():
        return None
    higher_is_better = measure.kind == "throughput"
    layout, height = panels([view.panel_title(down) for down in view.down_levels], [_PANEL_PX] * len(view.down_levels))
    traces: list[dict[str, Any]] = []
    methods = view.trials.methods
    width = 0.84 / len(methods)
    in_legend: set[str] = set()
    for index, down in enumerate(view.down_levels):
        panel = values[view.rows(None, None, down)]
        panel = panel[~np.isnan(panel) & (panel > 0)]
        low, high = (float(panel.min()), float(panel.max())) if len(panel) else (1.0, 1.0)
        logarithmic = high > 8 * low
        ceiling = high * (high / low) ** 0.08 if logarithmic else high * 1.12
        for place, method in enumerate(methods):
            offset = (place - (len(methods) - 1) / 2) * width
            boxes, dots, missing = _boxes(view, values, method, down, offset, width, ceiling)
            colour = view.colour(method)
            shared = {"name": method, "legendgroup": method, "yaxis": axis_name(index)}
            if boxes["x"]:
                traces.append(
                    {
                        **shared, **boxes, "type": "box", "width": width * 0.86, "showlegend": method not in in_legend,
                        "fillcolor": "rgba(0,0,0,0)", "line": {"color": colour, "width": 1.6},
                        "marker": {"color": colour}, "hoverinfo": "skip",
                    }
                )  # fmt: skip
                in_legend.add(method)
            traces.append(
                {
                    **shared, **dots, "type": "scatter", "mode": "markers", "showlegend": False, "opacity": 0.75,
                    "marker": {"color": colour, "size": 5.5},
                    "hovertemplate": f"%{{y:.4~g}} {measure.unit}<br>%{{customdata}}",
                }
            )  # fmt: skip
            if missing["x"]:
                traces.append(
                    {
                        **shared, **missing, "type": "scatter", "mode": "text", "showlegend": False,
                        "textposition": "top center", "textfont": {"color": colour, "size": 10.5},
                        "hovertemplate": "%{customdata}",
                    }
                )  # fmt: skip
        axis: dict[str, Any] = {"title": {"text": measure.unit}}
        if logarithmic:
            axis |= {"type": "log", **log_axis(low, ceiling * (high / low) ** 0.05)}
        else:
            axis |= {"range": [0, ceiling * 1.13]}
        layout[f"yaxis{index + 1 if index else ''}"] |= axis
    layout["xaxis"] |= {
        "title": {"text": view.across_title}, "range": [-0.5, len(view.across_levels) - 0.5], "showgrid": False,
        "tickvals": list(range(len(view.across_levels))),
        "ticktext": [level_name(level) if view.across else "" for level in view.across_levels],
    }  # fmt: skip
    note = (
        f"{'Further up' if higher_is_better else 'Further down'} is better. A box: the middle half of the runs, the line in "
        "it the median; dots are runs." + view.pooled_note
    )
    if not higher_is_better and (np.isnan(values)).any():
        note += (
            " A number at the top: so many runs did not arrive. They count as later than all others, so a box is open to the "
            "top where more than a quarter of them did not."
        )
    figure = Figure(
        {"time": "time-to-target", "steps": "updates-to-target", "throughput": "throughput"}[measure.kind],
        _capital(measure.title), note, traces, layout, [(name, "") for name in [*view.trial_columns(), measure.title]],
        height_px=height, legend=len(methods) > 1,
        rows=[[*view.trial_cells(row), None if math.isnan(values[row]) else float(values[row])] for row in range(len(values))],
    )  # fmt: skip
    return Drawn(
        figure, [*view.head(), "arrived", f"median, {measure.unit} (95 % interval)"], _box_rows(view, measure, values)
    )


def _boxes(
    view: View, values: np.ndarray, method: str, down: Any, offset: float, width: float, ceiling: float
) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[str, list[Any]]]:
    """What plotly needs for boxes, dots and the numbers of runs that did not arrive."""
    boxes: dict[str, list[Any]] = {name: [] for name in ("x", "q1", "median", "q3", "lowerfence", "upperfence")}
    dots: dict[str, list[Any]] = {"x": [], "y": [], "customdata": []}
    missing: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "customdata": []}
    for place, across in enumerate(view.across_levels):
        rows = view.rows(method, across, down)
        if not len(rows):
            continue
        own = np.where(np.isnan(values[rows]), np.inf, values[rows])
        arrived = np.isfinite(own)
        x = place + offset
        if arrived.sum() >= 2 and len(own) > 2:
            ordered = np.sort(own)
            q1, median, q3 = (
                float(np.quantile(np.where(np.isinf(ordered), ceiling, ordered), q)) for q in (0.25, 0.5, 0.75)
            )
            five = (x, q1, median, q3, float(ordered[0]), float(min(ordered[-1], ceiling)))
            for name, value in zip(boxes, five, strict=True):
                boxes[name].append(float(f"{value:.6g}"))
        spread = np.linspace(-0.5, 0.5, len(rows)) * width * 0.55 if len(rows) > 1 else np.zeros(1)
        dots["x"] += numbers(x + spread[arrived], 5)
        dots["y"] += numbers(own[arrived])
        dots["customdata"] += [_trial_text(view, row) for row in rows[arrived]]
        if not arrived.all():
            outcomes = view.trials.outcomes[rows[~arrived]].tolist()
            how = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
            missing["x"].append(round(x, 4))
            missing["y"].append(ceiling)
            missing["text"].append(str(len(outcomes)))
            missing["customdata"].append(f"{len(outcomes)} of {len(rows)} did not arrive: {how}")
    return boxes, dots, missing


def _trial_text(view: View, row: int) -> str:
    levels = [f"{name} {level_name(view.trials.column_of[name][row])}" for name in (*view.pooled, "seed") if name]
    return ", ".join(level.replace("_", " ") for level in levels)


def _box_rows(view: View, measure: Measure, values: np.ndarray) -> list[list[str]]:
    times = view.trials.times(measure)
    shown = []
    for method, across, down, rows in view.cells():
        own, reached = values[rows], ~np.isnan(values[rows])
        estimate = (
            median_estimate(own) if reached.all() or measure.kind == "throughput" else arrivals(times[rows]).median
        )
        shown.append(
            [*view.names(method, across, down), f"{int(reached.sum())} of {len(rows)}", estimate_text(estimate)]
        )
    return shown


def arrival_figure(view: View) -> Drawn | None:
    """Kaplan and Meier's curve of every method, in panels by level."""
    times = view.trials.times(view.measure)
    if view.measure.kind == "throughput" or times.reached.sum() < 2 or len(view.trials) < 3:
        return None
    levels = view.across_levels
    if len(levels) > _MOST_CURVE_PANELS:
        levels = [levels[at] for at in np.unique(np.linspace(0, len(levels) - 1, _MOST_CURVE_PANELS).astype(int))]
    titles = [f"{view.across_title} {level_name(level)}" if view.across else "" for level in levels]
    layout, height = panels(titles, [120] * len(levels))
    traces: list[dict[str, Any]] = []
    data: list[list[Any]] = []
    table: list[list[str]] = []
    finite = times.high[times.reached]
    logarithmic = finite.max() > 20 * finite.min()
    start, end = (float(finite.min()) * 0.8 if logarithmic else 0.0), float(finite.max()) * 1.05
    in_legend: set[str] = set()
    for index, level in enumerate(levels):
        for method in view.trials.methods:
            rows = view.rows(method, level, None)
            if not len(rows):
                continue
            curve = arrivals(times[rows])
            x = np.concatenate([[start], curve.at, [end]])
            last = curve.share[-1] if len(curve.share) else 0.0
            share = 100 * np.concatenate([[0.0], curve.share, [last]])
            band = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in zip(curve.low, curve.high, strict=True)]
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "name": method, "legendgroup": method, "yaxis": axis_name(index),
                    "showlegend": method not in in_legend, "x": numbers(x), "y": numbers(share, 4),
                    "line": {"shape": "hv", "color": view.colour(method), "width": 2, "dash": view.dash(method)},
                    "customdata": ["", *band, ""],
                    "hovertemplate": "%{y:.0f} % after %{x:.4~g} s<br>%{customdata}",
                }
            )  # fmt: skip
            in_legend.add(method)
            name = [method, *([level_name(level)] if view.across else [])]
            data += [
                [*name, *numbers(np.array([at, one, low, high]))]
                for at, one, low, high in zip(curve.at, curve.share, curve.low, curve.high, strict=True)
            ]
            table.append([*name, f"{curve.arrived} of {curve.count}", estimate_text(curve.median)])
        layout[f"yaxis{index + 1 if index else ''}"] |= {
            "title": {"text": "arrived (%)"},
            "range": [-3, 103],
            "nticks": 4,
        }
    x_axis: dict[str, Any] = {"title": {"text": f"{view.measure.title} (s)"}}
    x_axis |= {"type": "log", **log_axis(start, end)} if logarithmic else {"range": [0, end]}
    layout["xaxis"] |= x_axis
    head = ["method", *([view.across_title] if view.across else [])]
    others = [one for one in (view.down, *view.pooled) if one]
    together = f" All levels of {' and '.join(one.replace('_', ' ') for one in others)} together." if others else ""
    figure = Figure(
        "arrivals", "Which share of the runs had arrived by when",
        "Kaplan and Meier's estimate: further left and up is better. Runs that were stopped are censored then; diverged and "
        "crashed ones never arrive, so a curve may end below 100 %. Hovering shows 95 % intervals." + together,
        traces, layout, [(name, "") for name in [*head, "time (s)", "share", "low", "high"]],
        height_px=height, legend=len(view.trials.methods) > 1, rows=data,
    )  # fmt: skip
    return Drawn(figure, [*head, "arrived", "half had arrived after, s (95 % interval)"], table)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
