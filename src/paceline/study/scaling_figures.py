"""Figures of efficiency: updates needed against time per update, and what more workers bring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.observe.compare import number_text, workers_text
from paceline.observe.figures import log_axis
from paceline.observe.panels import Figure, axis_name, numbers, panels
from paceline.study.findings import interval_text, times_text
from paceline.study.statistics import Ratio, log_ratios, paired_ratio
from paceline.study.trials import METHOD, factor_text
from paceline.study.view import Drawn, View, level_name

__all__ = ["efficiency_figure", "speedup_figure"]

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def efficiency_figure(view: View) -> Drawn | None:
    """Statistical against computational efficiency: time to the target is the product of both axes."""
    if view.measure.kind == "throughput":
        return None
    trials = view.trials
    times = trials.values(view.measure.column)
    steps = trials.values(trials.measure("steps", view.measure.percent).column)
    per_step_ms = 1e3 * times / np.where(steps > 0, steps, np.nan)
    if np.isnan(per_step_ms).all():
        return None
    traces: list[dict[str, Any]] = []
    table: list[list[str]] = []
    for method in trials.methods:
        rows = view.rows(method)
        rows = rows[~np.isnan(per_step_ms[rows])]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{method}, runs", "legendgroup": method, "showlegend": False,
                "x": numbers(steps[rows]), "y": numbers(per_step_ms[rows]), "opacity": 0.22, "hoverinfo": "skip",
                "marker": {"color": view.colour(method), "size": 4},
            }
        )  # fmt: skip
    for method in trials.methods:
        points: dict[str, list[Any]] = {name: [] for name in ("x", "y", "text", "symbol", "customdata")}
        for one, across, down, rows in view.cells():
            known = rows[~np.isnan(per_step_ms[rows])]
            if one != method or not len(known):
                continue
            x, y = float(np.median(steps[known])), float(np.median(per_step_ms[known]))
            names = view.names(method, across, down)
            points["x"].append(float(f"{x:.6g}"))
            points["y"].append(float(f"{y:.6g}"))
            points["text"].append(level_name(across) if view.across else "")
            points["symbol"].append(_SYMBOLS[view.down_levels.index(down) % len(_SYMBOLS)])
            headed = [f"{head} {name}" for head, name in zip(view.head()[1:], names[1:], strict=True)]
            points["customdata"].append(
                f"{', '.join(headed)}<br>{number_text(float(np.median(times[known])))} s, {len(known)} runs"
            )
            table.append([*names, number_text(x), number_text(y), number_text(float(np.median(times[known])))])
        colour = view.colour(method)
        traces.append(
            {
                "type": "scatter", "mode": "markers+text", "name": method, "legendgroup": method, "x": points["x"],
                "y": points["y"], "text": points["text"], "textposition": "top right",
                "textfont": {"color": colour, "size": 10.5}, "customdata": points["customdata"],
                "marker": {"color": colour, "size": 9, "symbol": points["symbol"]},
                "hovertemplate": "%{x:,.4~g} updates of %{y:.3~g} ms<br>%{customdata}",
            }
        )  # fmt: skip
    known = ~np.isnan(per_step_ms)
    x_low, x_high, y_low, y_high = _around(steps[known], per_step_ms[known])
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"updates to {view.measure.goal}"}, "type": "log", **log_axis(x_low, x_high)},
        "yaxis": {"title": {"text": "time per update (ms)"}, "type": "log", **log_axis(y_low, y_high)},
        "shapes": [], "annotations": [],
    }  # fmt: skip
    _equal_times(layout, x_low * 0.75, x_high * 1.3, y_low * 0.75, y_high * 1.3)
    shapes = ""
    if view.down:
        listed = zip(view.down_levels, _SYMBOLS, strict=False)
        shapes = (
            f" Symbols: {factor_text(view.down)} "
            + ", ".join(f"{level_name(level)} {symbol}" for level, symbol in listed)
            + "."
        )
    numbers_note = f" The number at a mark: {view.across_title}." if view.across else ""
    figure = Figure(
        "efficiency", "Updates needed against time per update",
        "Further left: better updates (statistical efficiency). Further down: faster ones (computational efficiency). On a "
        "dashed line time to the target is the same. Large marks are medians, small dots runs."
        + numbers_note + shapes + view.pooled_note,
        traces, layout, [(name, "") for name in [*view.trial_columns(), "updates", "ms per update"]], height_px=420,
        legend=len(trials.methods) > 1,
        rows=[[*view.trial_cells(row), *numbers(np.array([steps[row], per_step_ms[row]]))] for row in range(len(trials))],
    )  # fmt: skip
    return Drawn(figure, [*view.head(), "updates", "ms per update", "time, s"], table)


def _around(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    return float(x.min()), float(x.max()), float(y.min()), float(y.max())


def _equal_times(layout: dict[str, Any], x_low: float, x_high: float, y_low: float, y_high: float) -> None:
    """Dashed lines of equal time, at powers of ten and their halves, within the frame."""
    low_s, high_s = x_low * y_low / 1e3, x_high * y_high / 1e3
    decades = range(math.floor(math.log10(low_s)), math.ceil(math.log10(high_s)) + 1)
    times = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    shown = [one for one in times if low_s * 1.5 < one < high_s / 1.5]
    for time_s in shown[:: max(1, math.ceil(len(shown) / 7))]:
        x0, x1 = max(x_low, 1e3 * time_s / y_high), min(x_high, 1e3 * time_s / y_low)
        if x1 <= x0:
            continue
        line = {"color": "@line", "width": 1, "dash": "dash"}
        layout["shapes"].append(
            {
                "type": "line",
                "x0": x0,
                "y0": 1e3 * time_s / x0,
                "x1": x1,
                "y1": 1e3 * time_s / x1,
                "line": line,
                "layer": "below",
            }
        )
        layout["annotations"].append(
            {
                "x": math.log10(x0), "y": math.log10(1e3 * time_s / x0), "text": f"{time_s:g} s", "showarrow": False,
                "xanchor": "left", "yanchor": "top" if x0 > x_low else "bottom", "font": {"color": "@soft", "size": 10},
            }
        )  # fmt: skip


def speedup_figure(view: View) -> Drawn | None:
    """How many times sooner with more workers, of the same method; by pairs of equal seeds."""
    trials = view.trials
    if "workers" not in trials.others or len(trials) < 2:
        return None
    first, *more = [level for level in trials.factors["workers"] if isinstance(level, int)]
    if not more:
        return None
    down = view.down if view.across == "workers" else None
    times = trials.times(view.measure)
    levels = trials.factors[down] if down else [None]
    layout, height = panels([view.panel_title(level) for level in levels], [190] * len(levels))
    traces: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    table: list[list[str]] = []
    highest = max(1.0, max(more) / first if max(more) <= 8 * first else 1.0)
    for index, level in enumerate(levels):
        ends: list[float] = []
        for method in trials.methods:
            x, y, low, high, text = [first], [1.0], [1.0], [1.0], [""]
            for workers in more:
                where = {METHOD: method, **({down: level} if down else {})}
                base, other = trials.pairs("workers", first, workers, where)
                ratio = paired_ratio(*log_ratios(times[base], times[other]))
                if not ratio.pairs:
                    continue
                value = _middle(ratio)
                x.append(workers)
                y.append(value)
                low.append(ratio.low if ratio.method != "none" else math.nan)
                high.append(ratio.high if ratio.method != "none" and math.isfinite(ratio.high) else math.nan)
                text.append(f"{times_text(ratio)}, {interval_text(ratio)}, {ratio.pairs} pairs")
                names = [method, str(workers), *([level_name(level)] if down else [])]
                rows.append([*names, *numbers(np.array([value, ratio.low, ratio.high])), ratio.pairs])
                table.append([*names, times_text(ratio), interval_text(ratio), str(ratio.pairs)])
            if len(x) == 1:
                continue
            up = np.nan_to_num(np.array(high) - np.array(y), nan=0.0)
            below = np.nan_to_num(np.array(y) - np.array(low), nan=0.0)
            ends += [one for one in y if math.isfinite(one)]
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": method, "legendgroup": method,
                    "showlegend": index == 0, "yaxis": axis_name(index), "x": x, "y": numbers(np.array(y)), "customdata": text,
                    "line": {"color": view.colour(method), "width": 2, "dash": view.dash(method)},
                    "marker": {"color": view.colour(method), "size": 6},
                    "error_y": {
                        "type": "data", "symmetric": False, "array": numbers(up), "arrayminus": numbers(below),
                        "color": view.colour(method), "thickness": 1.2, "width": 3,
                    },
                    "hovertemplate": "%{customdata}",
                }
            )  # fmt: skip
        top = max([highest, *ends]) * 1.12
        ideal = {"color": "@soft", "width": 1, "dash": "dash"}
        reach = min(max(more) / first, top)
        layout.setdefault("shapes", []).append(
            {
                "type": "line",
                "yref": axis_name(index),
                "x0": first,
                "x1": first * reach,
                "y0": 1,
                "y1": reach,
                "line": ideal,
            }
        )
        layout[f"yaxis{index + 1 if index else ''}"] |= {"title": {"text": "times as fast"}, "range": [0, top]}
    if not table:
        return None
    layout["xaxis"] |= {
        "title": {"text": "workers"}, "tickvals": [first, *more],
        "range": [first - 0.1 * (max(more) - first), max(more) * 1.06],
    }  # fmt: skip
    others = tuple(name for name in trials.others if name not in ("workers", down))
    together = f" All levels of {' and '.join(one.replace('_', ' ') for one in others)} together." if others else ""
    what = f"sooner to {view.measure.goal}" if view.measure.kind != "throughput" else "as many samples per second"
    names = ["method", "workers", *([factor_text(down)] if down else [])]
    figure = Figure(
        "speed-up", "What more workers bring",
        f"How many times {what} than the same method with {workers_text(first)}: medians of pairs with equal seeds, 95 % "
        "intervals. Dashed: in proportion to the workers."
        + (" Missing marks: too many runs did not arrive." if any(row[-4] is None for row in rows) else "") + together,
        traces, layout, [(name, "") for name in [*names, "times as fast", "low", "high", "pairs"]],
        height_px=height, legend=len(trials.methods) > 1, rows=rows,
    )  # fmt: skip
    return Drawn(figure, [*names, "times as fast", "interval", "pairs"], table)


def _middle(ratio: Ratio) -> float:
    """The median ratio; where missing arrivals hide it, the bound that is known."""
    if math.isfinite(ratio.at_most) and ratio.at_least > 0:
        return math.sqrt(ratio.at_least * ratio.at_most)
    return ratio.at_least if ratio.at_least > 0 and math.isfinite(ratio.at_least) else math.nan
