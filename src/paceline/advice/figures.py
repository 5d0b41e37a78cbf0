"""The figures of advice: predicted loss or accuracy against time with what was measured, and when each candidate arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.advice.answer import Advice, Candidate, Prediction
from paceline.advice.words import INTERVAL, column_unit, label, measure_name, seconds_in, span_in
from paceline.observe.compare import seconds_text
from paceline.observe.figures import log_axis
from paceline.observe.panels import Figure, numbers

__all__ = ["advice_figures", "colour_of"]

_EMPHASISED = 6
_WITH_BARS = 3  # more would hide each other on one line
_MOST_ROWS = 24
_ROW_PX = 42
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def colour_of(advice: Advice, candidate: Candidate) -> str | None:
    """The colour of one of the best candidates; None: it is one of the others."""
    best = [
        one.candidate for one in advice.ranked[:_EMPHASISED] if one.time_s is not None or one.at_deadline is not None
    ]
    return f"@method-{best.index(candidate)}" if candidate in best else None


def advice_figures(advice: Advice) -> list[Figure]:
    """Both figures, as far as there is something to draw."""
    return [one for one in (_curves(advice), _arrivals(advice)) if one is not None]


def _curves(advice: Advice) -> Figure | None:
    """A line per predicted candidate, the best in colour; points are real runs; error bars are arrivals."""
    target = advice.target
    wanted = target.loss if target.accuracy is None else 100 * target.accuracy
    scale = 1.0 if target.accuracy is None else 100.0
    traces = [*_lines(advice, scale), *_points(advice, scale)]
    if not traces:
        return None
    y_axis, logarithmic = _y_axis(advice, traces, wanted)
    x_axis, until_s = _x_axis(advice, traces)
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": y_axis, "shapes": [], "annotations": []}
    if wanted is not None:
        traces += [_bar(advice, one, wanted, until_s) for one in advice.ranked[:_WITH_BARS] if one.time_s is not None]
        _rule(layout, f"target {wanted:.6g}{' %' if scale > 1 else ''}", y=wanted, logarithmic=logarithmic)
    if target.deadline_s is not None:
        traces += [
            _bar_at_deadline(advice, one, target.deadline_s, scale)
            for one in advice.ranked[:_WITH_BARS]
            if one.at_deadline is not None
        ]
        _rule(
            layout,
            f"deadline {seconds_text(target.deadline_s)}",
            x=target.deadline_s,
            logarithmic=x_axis.get("type") == "log",
        )
    name = measure_name(target)
    rows = [
        [trace["meta"], trace["name"], x, y]
        for trace in traces
        if "meta" in trace
        for x, y in zip(trace["x"], trace["y"], strict=True)
    ]
    by_then = "" if target.deadline_s is None else ", and what is reached by the deadline"
    return Figure(
        "curves",
        f"{name.capitalize()} that is predicted, and what was measured",
        "Lines: predictions, the best candidates in colour, all others grey. Points: short runs on this machine. "
        f"Bars: {INTERVAL}s of the first three: when the target is reached{by_then}.",
        traces,
        layout,
        [(header, "") for header in ("what", "candidate", "time (s)", name + (" (%)" if scale > 1 else ""))],
        rows=rows,
    )


def _lines(advice: Advice, scale: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    others = 0
    for one in reversed(advice.ranked):  # the best above all others
        if not one.curve:
            continue
        colour = colour_of(advice, one.candidate)
        others += colour is None
        lines.append(
            {
                "type": "scatter", "mode": "lines", "meta": "predicted", "name": label(one.candidate),
                "showlegend": colour is not None,
                "x": numbers(np.array([at for at, _ in one.curve])),
                "y": numbers(scale * np.array([value for _, value in one.curve])),
                "line": {"color": colour or "@line", "width": 2.4 if colour else 1.3},
                "hovertemplate": f"%{{y:.4g}}{' %' if scale > 1 else ''} at %{{x:,.4~g}} s",
            }
        )  # fmt: skip
    lines.sort(key=lambda line: line["showlegend"])
    shown = [line for line in lines if line["showlegend"]][::-1]
    lines = [line for line in lines if not line["showlegend"]] + _legend_order(shown)
    if others:
        name = "another candidate" if others == 1 else f"{others} other candidates"
        lines.append(_legend_only(name, {"mode": "lines", "line": {"color": "@line", "width": 1.3}}))
    return lines


def _legend_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best first in the legend, and yet above the others: `lines` from the best on."""
    return [{**line, "legendrank": rank} for rank, line in reversed(list(enumerate(lines, start=1)))]


def _legend_only(name: str, looks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "scatter", "name": name, "x": [None], "y": [None], "hoverinfo": "skip", "legendrank": 1100, **looks}


def _points(advice: Advice, scale: float) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for one in advice.measured:
        if not one.curve:
            continue
        curve = [one.curve[at] for at in np.unique(np.linspace(0, len(one.curve) - 1, 200).astype(int))]
        points.append(
            {
                "type": "scatter", "mode": "markers", "meta": "measured", "name": f"{label(one.candidate)}, measured",
                "showlegend": False,
                "x": numbers(np.array([at for at, _ in curve])),
                "y": numbers(scale * np.array([value for _, value in curve])),
                "marker": {"color": colour_of(advice, one.candidate) or "@soft", "size": 4.5},
                "opacity": 0.75,
                "hovertemplate": f"%{{y:.4g}}{' %' if scale > 1 else ''} at %{{x:,.4~g}} s, measured",
            }
        )  # fmt: skip
    if points:
        points.append(_legend_only("measured here", {"mode": "markers", "marker": {"color": "@soft", "size": 5}}))
    return points


def _bar(advice: Advice, one: Prediction, wanted: float, until_s: float) -> dict[str, Any]:
    """When the target is reached, on its line; an interval without upper end leaves the figure."""
    assert one.time_s is not None
    found, colour = one.time_s, colour_of(advice, one.candidate)
    high = found.high if math.isfinite(found.high) else max(until_s, found.value) * 10
    return {
        "type": "scatter", "mode": "markers", "meta": "reached", "name": label(one.candidate), "showlegend": False,
        "x": numbers(np.array([found.value])), "y": [wanted],
        "error_x": {
            "type": "data", "symmetric": False, "array": [high - found.value], "arrayminus": [found.value - found.low],
            "color": colour, "thickness": 1.8, "width": 5,
        },
        "marker": {"color": colour, "size": 9, "symbol": "diamond"},
        "hovertemplate": f"reached after %{{x:,.4~g}} s<br>{INTERVAL} {span_in('s', found)} s",
    }  # fmt: skip


def _bar_at_deadline(advice: Advice, one: Prediction, deadline_s: float, scale: float) -> dict[str, Any]:
    assert one.at_deadline is not None
    found, colour = one.at_deadline, colour_of(advice, one.candidate)
    ends = (scale * found.value, scale * max(0.0, found.low), scale * found.high if math.isfinite(found.high) else None)
    return {
        "type": "scatter", "mode": "markers", "meta": "by the deadline", "name": label(one.candidate), "showlegend": False,
        "x": [deadline_s], "y": numbers(np.array(ends[:1])),
        "error_y": {
            "type": "data", "symmetric": False, "array": [0 if ends[2] is None else ends[2] - ends[0]],
            "arrayminus": [ends[0] - ends[1]], "color": colour, "thickness": 1.8, "width": 5,
        },
        "marker": {"color": colour, "size": 9, "symbol": "square"},
        "hovertemplate": "%{y:.4g} by the deadline",
    }  # fmt: skip


def _y_axis(advice: Advice, traces: Sequence[dict[str, Any]], wanted: float | None) -> tuple[dict[str, Any], bool]:
    """From what is seen and the target; a loss that falls far has a logarithmic axis."""
    values = [value for trace in traces for value in trace["y"] if value is not None]
    values += [] if wanted is None else [wanted]
    name = measure_name(advice.target)
    if advice.target.accuracy is not None:
        return {"title": {"text": f"{name} (%)"}}, False
    positive = [value for value in values if value > 0]
    starts = [trace["y"][0] for trace in traces if trace["y"] and trace["y"][0] is not None]
    high = min(max(positive, default=1.0), 2 * max([*starts, wanted or 0.0], default=1.0) or 1.0)  # not what diverged
    if positive and high > 8 * min(positive):
        return {"title": {"text": f"{name} (log scale)"}, "type": "log", **log_axis(min(positive), high)}, True
    return {"title": {"text": name}, "range": [0, 1.05 * high]}, False


def _x_axis(advice: Advice, traces: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """Up to the last arrival that is shown; logarithmic where the short runs would vanish at its beginning."""
    ends = [
        min(one.time_s.high, 1.6 * one.time_s.value) for one in advice.ranked[:_EMPHASISED] if one.time_s is not None
    ]
    deadline_s = advice.target.deadline_s
    ends += [] if deadline_s is None else [deadline_s]
    seen = [value for trace in traces for value in trace["x"] if value is not None]
    until_s = 1.08 * max(ends or seen)
    measured = [one.curve[-1][0] for one in advice.measured if one.curve]
    positive = [value for value in seen if value > 0]
    if measured and positive and until_s > 30 * max(measured):
        first_s = max(min(positive), max(measured) / 100)
        return {"title": {"text": "time (s, log scale)"}, "type": "log", **log_axis(first_s, until_s)}, until_s
    return {"title": {"text": "time (s)"}, "range": [0, until_s]}, until_s


def _rule(
    layout: dict[str, Any], text: str, *, logarithmic: bool, x: float | None = None, y: float | None = None
) -> None:
    """A dashed line across the figure, with its name."""
    at = x if y is None else y
    assert at is not None
    placed = math.log10(at) if logarithmic else at  # plotly's annotations want the logarithm, its shapes do not
    line = {"type": "line", "line": {"color": "@soft", "width": 1, "dash": "dash"}}
    words = {"text": text, "showarrow": False, "font": {"color": "@soft", "size": 11}}
    if y is not None:
        layout["shapes"].append({**line, "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y})
        layout["annotations"].append(
            {**words, "xref": "paper", "x": 0, "xanchor": "left", "y": placed, "yanchor": "bottom"}
        )
    else:
        layout["shapes"].append({**line, "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x})
        layout["annotations"].append(
            {**words, "yref": "paper", "y": 1, "yanchor": "top", "x": placed, "xanchor": "right", "textangle": 0}
        )


def _arrivals(advice: Advice) -> Figure | None:
    """A row per candidate that arrives: its interval, its simulations, and what the models say alone."""
    shown = [one for one in advice.ranked if one.time_s is not None][:_MOST_ROWS]
    if not shown:
        return None
    unit = column_unit([one.time_s.value for one in shown if one.time_s is not None])
    size_s = _UNITS_S[unit]
    rows = list(range(len(shown)))
    estimates = [one.time_s for one in shown if one.time_s is not None]
    finite = [end for one in estimates for end in (one.value, one.high) if math.isfinite(end)]
    finite += [value for one in shown for value in one.simulated_s if math.isfinite(value)]
    least, most = min([one.low for one in estimates] + finite) / size_s, max(finite) / size_s
    logarithmic = most > 20 * least > 0
    values = np.array([one.value for one in estimates]) / size_s
    lows, highs = (np.array([getattr(one, end) for one in estimates]) / size_s for end in ("low", "high"))
    highs = np.where(np.isfinite(highs), highs, 10 * most)
    colours = [colour_of(advice, one.candidate) or "@soft" for one in shown]
    names = [label(one.candidate) for one in shown]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers", "name": names[row], "showlegend": False,
            "x": numbers(values[row : row + 1]), "y": [row],
            "error_x": {
                "type": "data", "symmetric": False, "array": [float(highs[row] - values[row])],
                "arrayminus": [float(values[row] - lows[row])], "color": colours[row], "thickness": 2.2, "width": 5,
            },
            "marker": {"color": colours[row], "size": 10, "symbol": "diamond"},
            "hovertemplate": f"{seconds_in(unit, estimates[row].value)} {unit}<br>{INTERVAL}"
            f" {span_in(unit, estimates[row])} {unit}",
        }
        for row in rows
    ]  # fmt: skip
    simulated = [(row, value / size_s) for row in rows for value in shown[row].simulated_s if math.isfinite(value)]
    modelled = [(row, found.value / size_s) for row in rows if (found := shown[row].modelled_s) is not None]
    for name, points, symbol in (("simulated", simulated, "circle"), ("by the models alone", modelled, "x-thin-open")):
        if points:
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": name,
                    "x": numbers(np.array([value for _, value in points])), "y": [row + 0.26 for row, _ in points],
                    "marker": {"color": "@soft", "size": 6, "symbol": symbol, "line": {"color": "@soft", "width": 1.6}},
                    "customdata": [names[row] for row, _ in points],
                    "hovertemplate": f"%{{x:,.4~g}} {unit} {name}<br>%{{customdata}}<extra></extra>",
                }
            )  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time to the target ({unit}{', log scale' if logarithmic else ''})"}},
        "yaxis": {"range": [len(rows) - 0.4, -0.75], "showticklabels": False, "showgrid": False},
        "annotations": [
            {
                "text": names[row].replace("<", "&lt;"), "showarrow": False, "xref": "paper", "x": 0, "xanchor": "left",
                "y": row - 0.22, "yanchor": "bottom", "font": {"size": 12, "color": "@text"},
            }
            for row in rows
        ],
    }  # fmt: skip
    layout["xaxis"] |= {"type": "log", **log_axis(least, most)} if logarithmic else {"range": [0, 1.08 * most]}
    columns = ("candidate", f"time ({unit})", "low", "high", "simulated", "by the models alone")
    cells = [
        [
            names[row], float(values[row]), float(lows[row]), estimates[row].high / size_s,
            " ".join(f"{value / size_s:.6g}" for value in one.simulated_s),
            None if one.modelled_s is None else one.modelled_s.value / size_s,
        ]
        for row, one in enumerate(shown)
    ]  # fmt: skip
    cells = [[None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row] for row in cells]
    cut = len([one for one in advice.ranked if one.time_s is not None]) - len(shown)
    return Figure(
        "arrivals",
        "When each candidate is expected to arrive",
        f"Diamonds: predictions with their {INTERVAL}s. Dots: single simulations. Crosses: what the fitted models say by"
        f" themselves.{f' {cut} more candidates arrive later.' if cut else ''}",
        traces,
        layout,
        [(header, "") for header in columns],
        height_px=_ROW_PX * len(rows) + 16,
        legend=bool(simulated or modelled),
        rows=cells,
    )
