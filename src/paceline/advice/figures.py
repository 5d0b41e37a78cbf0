"""The figures of advice: predicted and measured progress over time, and when candidates reach the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.advice.answer import Advice
from paceline.advice.tables import EMPHASISED, colour_of, ranking_unit, seconds_in, span_in
from paceline.advice.words import INTERVAL, label, measure_name
from paceline.observe.drawing import Figure, add_rule, error_bars, log_axis, numbers, scatter, thin
from paceline.observe.words import SECONDS_IN, capital, seconds_text

_WITH_BARS = 3  # more would hide each other on one line
_MOST_ROWS = 24
_MOST_POINTS = 200
_ROW_PX = 42


def advice_figures(advice: Advice) -> list[Figure]:
    """The figures that have data."""
    return [one for one in (_curves(advice), _arrivals(advice)) if one is not None]


def _curves(advice: Advice) -> Figure | None:
    """A line per predicted candidate, the best in colour; points are real runs; error bars are arrivals."""
    target = advice.target
    scale, percent = (1.0, "") if target.accuracy is None else (100.0, " %")
    wanted = target.loss if target.accuracy is None else scale * target.accuracy
    traces = [*_lines(advice, scale, percent), *_points(advice, scale, percent)]
    if not traces:
        return None
    y_axis = _y_axis(advice, traces, wanted)
    x_axis, until_s = _x_axis(advice, traces)
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": y_axis}
    traces += _bars(advice, wanted, until_s, scale)
    if wanted is not None:
        add_rule(layout, f"target {wanted:.6g}{percent}", y=wanted)
    if target.deadline_s is not None:
        add_rule(layout, f"deadline {seconds_text(target.deadline_s)}", x=target.deadline_s)
    name = measure_name(target)
    by_then = "" if target.deadline_s is None else ", and what is reached by the deadline"
    return Figure(
        "curves",
        f"{capital(name)} that is predicted, and what was measured",
        "Lines: predictions, the best candidates in colour, all others grey. Points: short runs on this machine. "
        f"Bars: {INTERVAL}s of the first three: when the target is reached{by_then}.",
        traces,
        layout,
        columns={"what": "meta", "candidate": "name", "time (s)": "x", name + (" (%)" if percent else ""): "y"},
    )


def _lines(advice: Advice, scale: float, percent: str) -> list[dict[str, Any]]:
    """Lines with the best drawn last, on top, but first in the legend."""
    predicted = [(one, colour_of(advice, one.candidate)) for one in advice.ranked if one.curve]
    coloured = [one.candidate for one, colour in predicted if colour]
    lines: list[dict[str, Any]] = []
    coloured_first = sorted(predicted, key=lambda pair: pair[1] is None)
    for one, colour in coloured_first[::-1]:
        x, y = zip(*one.curve, strict=True)
        lines.append(
            scatter(
                "lines", label(one.candidate), x, np.multiply(scale, y), meta="predicted", showlegend=colour is not None,
                line={"color": colour or "@line", "width": 2.4 if colour else 1.3},
                hovertemplate=f"%{{y:.4g}}{percent} at %{{x:,.4~g}} s",
            )
        )  # fmt: skip
        if colour:
            lines[-1]["legendrank"] = 1 + coloured.index(one.candidate)
    if others := len(predicted) - len(coloured):
        name = "another candidate" if others == 1 else f"{others} other candidates"
        lines.append(_legend_only("lines", name, line={"color": "@line", "width": 1.3}))
    return lines


def _legend_only(mode: str, name: str, **looks: Any) -> dict[str, Any]:
    return scatter(mode, name, [math.nan], [math.nan], hoverinfo="skip", legendrank=1100, **looks)


def _points(advice: Advice, scale: float, percent: str) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for one in advice.measured:
        if one.curve:
            x, y = zip(*(one.curve[at] for at in thin(len(one.curve), _MOST_POINTS)), strict=True)
            points.append(
                scatter(
                    "markers", f"{label(one.candidate)}, measured", x, np.multiply(scale, y), meta="measured",
                    showlegend=False, marker={"color": colour_of(advice, one.candidate) or "@soft", "size": 4.5},
                    opacity=0.75, hovertemplate=f"%{{y:.4g}}{percent} at %{{x:,.4~g}} s, measured",
                )
            )  # fmt: skip
    if points:
        points.append(_legend_only("markers", "measured here", marker={"color": "@soft", "size": 5}))
    return points


def _bars(advice: Advice, wanted: float | None, until_s: float, scale: float) -> list[dict[str, Any]]:
    """For the first three candidates: when they reach the target, and the value that they reach by the deadline."""
    bars: list[dict[str, Any]] = []
    for one in advice.ranked[:_WITH_BARS]:
        colour, name, deadline_s = colour_of(advice, one.candidate), label(one.candidate), advice.target.deadline_s
        looks: dict[str, Any] = {"thickness": 1.8, "width": 5}
        if wanted is not None and (found := one.time_s) is not None:
            high = found.high if math.isfinite(found.high) else max(until_s, found.value) * 10  # leaves the figure
            bars.append(
                scatter(
                    "markers", name, [found.value], [wanted], meta="reached", showlegend=False,
                    error_x=error_bars(found.value, found.low, high, colour, **looks),
                    marker={"color": colour, "size": 9, "symbol": "diamond"},
                    hovertemplate=f"reached after %{{x:,.4~g}} s<br>{INTERVAL} {span_in('s', found)} s",
                )
            )  # fmt: skip
        if deadline_s is not None and (found := one.at_deadline) is not None:
            value, low, high = (scale * end for end in (found.value, max(0.0, found.low), found.high))
            bars.append(
                scatter(
                    "markers", name, [deadline_s], [value], meta="by the deadline", showlegend=False,
                    error_y=error_bars(value, low, high, colour, **looks),
                    marker={"color": colour, "size": 9, "symbol": "square"}, hovertemplate="%{y:.4g} by the deadline",
                )
            )  # fmt: skip
    return bars


def _y_axis(advice: Advice, traces: Sequence[dict[str, Any]], wanted: float | None) -> dict[str, Any]:
    """From the measured values and the target; a loss that falls far has a logarithmic axis."""
    name = measure_name(advice.target)
    if advice.target.accuracy is not None:
        return {"title": {"text": f"{name} (%)"}}
    values = [value for trace in traces for value in trace["y"] if value is not None]
    positive = [value for value in [*values, wanted or 0.0] if value > 0]
    starts = [trace["y"][0] for trace in traces if trace["y"] and trace["y"][0] is not None]
    high = min(max(positive, default=1.0), 2 * max([*starts, wanted or 0.0], default=1.0) or 1.0)  # not what diverged
    if positive and high > 8 * min(positive):
        return {"title": {"text": f"{name} (log scale)"}, **log_axis(min(positive), high)}
    return {"title": {"text": name}, "range": [0, 1.05 * high]}


def _x_axis(advice: Advice, traces: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Up to the last time shown; logarithmic if the short runs would vanish at its beginning."""
    times = [one.time_s for one in advice.ranked[:EMPHASISED] if one.time_s is not None]
    ends = [min(one.high, 1.6 * one.value) for one in times]
    ends += [advice.target.deadline_s] if advice.target.deadline_s is not None else []
    seen = [value for trace in traces for value in trace["x"] if value is not None]
    until_s = 1.08 * max(ends or seen)
    measured = [one.curve[-1][0] for one in advice.measured if one.curve]
    positive = [value for value in seen if value > 0]
    if measured and positive and until_s > 30 * max(measured):
        first_s = max(min(positive), max(measured) / 100)
        return {"title": {"text": "time (s, log scale)"}, **log_axis(first_s, until_s)}, until_s
    return {"title": {"text": "time (s)"}, "range": [0, until_s]}, until_s


def _arrivals(advice: Advice) -> Figure | None:
    """A row per candidate that arrives: its interval, its simulations, and what the models say alone."""
    arriving = [(one, one.time_s) for one in advice.ranked if one.time_s is not None]
    shown = arriving[:_MOST_ROWS]
    if not shown:
        return None
    unit = ranking_unit(advice)
    size_s = SECONDS_IN[unit]
    names = [label(one.candidate) for one, _ in shown]
    values, lows, highs = (
        np.array([getattr(found, end) for _, found in shown]) / size_s for end in ("value", "low", "high")
    )
    points = {
        "simulated": [(row, time_s / size_s) for row, (one, _) in enumerate(shown) for time_s in one.simulated_s],
        "by the models alone": [
            (row, one.modelled_s.value / size_s) for row, (one, _) in enumerate(shown) if one.modelled_s
        ],
    }
    points = {name: [point for point in of if math.isfinite(point[1])] for name, of in points.items()}
    seen = [*values, *highs[np.isfinite(highs)], *(value for _, value in points["simulated"])]
    least, most = min([*lows, *seen]), max(seen)
    logarithmic = most > 20 * least > 0
    traces: list[dict[str, Any]] = []
    for row, (one, found) in enumerate(shown):
        colour = colour_of(advice, one.candidate) or "@soft"
        end = highs[row] if math.isfinite(highs[row]) else 10 * most
        traces.append(
            scatter(
                "markers", names[row], [values[row]], [row], showlegend=False,
                error_x=error_bars(values[row], lows[row], end, colour, thickness=2.2, width=5),
                marker={"color": colour, "size": 10, "symbol": "diamond"},
                hovertemplate=f"{seconds_in(unit, found.value)} {unit}<br>{INTERVAL} {span_in(unit, found)} {unit}",
            )
        )  # fmt: skip
    for (name, of), symbol in zip(points.items(), ("circle", "x-thin-open"), strict=True):
        if of:
            rows, x = zip(*of, strict=True)
            traces.append(
                scatter(
                    "markers", name, x, np.add(rows, 0.26), customdata=[names[row] for row in rows],
                    marker={"color": "@soft", "size": 6, "symbol": symbol, "line": {"color": "@soft", "width": 1.6}},
                    hovertemplate=f"%{{x:,.4~g}} {unit} {name}<br>%{{customdata}}<extra></extra>",
                )
            )  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {
            "title": {"text": f"time to the target ({unit}{', log scale' if logarithmic else ''})"},
            **(log_axis(least, most) if logarithmic else {"range": [0, 1.08 * most]}),
        },
        "yaxis": {"range": [len(shown) - 0.4, -0.75], "showticklabels": False, "showgrid": False},
        "annotations": [
            {
                "text": name.replace("<", "&lt;"), "showarrow": False, "xref": "paper", "x": 0, "xanchor": "left",
                "y": row - 0.22, "yanchor": "bottom", "font": {"size": 12, "color": "@text"},
            }
            for row, name in enumerate(names)
        ],
    }  # fmt: skip
    cells = [
        [
            names[row], *numbers([values[row], lows[row], highs[row]]),
            " ".join(f"{value / size_s:.6g}" for value in one.simulated_s),
            None if one.modelled_s is None else numbers([one.modelled_s.value / size_s])[0],
        ]
        for row, (one, _) in enumerate(shown)
    ]  # fmt: skip
    cut = len(arriving) - len(shown)
    return Figure(
        "arrivals",
        "When each candidate is expected to arrive",
        f"Diamonds: predictions with their {INTERVAL}s. Dots: single simulations. Crosses: what the fitted models say by"
        f" themselves.{f' {cut} more candidates arrive later.' if cut else ''}",
        traces,
        layout,
        [["candidate", f"time ({unit})", "low", "high", "simulated", "by the models alone"], *cells],
        height_px=_ROW_PX * len(shown) + 16,
        legend=any(points.values()),
    )
