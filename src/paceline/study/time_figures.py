"""Figures of time: boxes, arrivals, efficiency, and what more workers bring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.observe.drawing import Figure, Panels, axis_name, dashed, error_bars, log_axis, numbers, scatter, thin
from paceline.observe.words import capital, number_text, workers_text
from paceline.study.facets import FacetCell, Facets, estimate_text, median_text
from paceline.study.findings import interval_text, times_text
from paceline.study.statistics import Ratio, arrival_curve, log_ratios, paired_ratio
from paceline.study.trials import METHOD, Measure, factor_text, level_name

_PANEL_PX = 190
_MOST_CURVE_PANELS = 4
_NAMES = {"time": "time-to-target", "steps": "updates-to-target", "throughput": "throughput"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def box_figure(facets: Facets, measure: Measure) -> Figure | None:
    """One box per method at every level; runs that never reached the target count as later than all."""
    values = facets.trials.values(measure.column)
    if np.isnan(values).all():
        return None
    levels, methods = facets.down_levels, facets.trials.methods
    panels = Panels([facets.panel_title(down) for down in levels], [_PANEL_PX] * len(levels))
    up = measure.kind == "throughput"
    for index, down in enumerate(levels):
        panel = values[facets.rows(None, None, down)]
        panel = panel[panel > 0]
        low, high = (float(panel.min()), float(panel.max())) if len(panel) else (1.0, 1.0)
        logarithmic = high > 8 * low
        ceiling = high * (high / low) ** 0.08 if logarithmic else high * 1.12
        for method in methods:
            cells = [(at, facets.rows(method, across, down)) for at, across in enumerate(facets.across_levels)]
            at, rows = (np.concatenate(one) for one in zip(*((np.full(len(r), at), r) for at, r in cells), strict=True))
            if up:
                at, rows = at[~np.isnan(values[rows])], rows[~np.isnan(values[rows])]
            colour = facets.colour(method)
            panels.add(
                index, legend=method, name=method, type="box", x=at.tolist(), y=numbers(np.fmin(values[rows], ceiling)),
                quartilemethod="linear", boxpoints="all", pointpos=0, jitter=0.5, offsetgroup=method, hoveron="points",
                customdata=[_trial_text(facets, measure, values, row) for row in rows], hovertemplate="%{customdata}",
                fillcolor="rgba(0,0,0,0)", line={"color": colour, "width": 1.6},
                marker={"color": colour, "size": 5.5, "opacity": 0.75},
            )  # fmt: skip
        y_range = log_axis(low, ceiling * (high / low) ** 0.05) if logarithmic else {"range": [0, ceiling * 1.13]}
        panels.y(index, title={"text": measure.unit}, **y_range)
    panels.layout["boxmode"] = "group"
    panels.x |= {
        "title": {"text": facets.across_title}, "range": [-0.5, len(facets.across_levels) - 0.5], "showgrid": False,
        "tickvals": list(range(len(facets.across_levels))),
        "ticktext": [level_name(level) if facets.across else "" for level in facets.across_levels],
    }  # fmt: skip
    note = (
        f"{'Further up' if up else 'Further down'} is better. A box: the middle half of the runs, the line in "
        "it the median; dots are runs." + facets.pooled_note
    )
    if not up and np.isnan(values).any():
        note += " Dots at the top did not arrive. They count as later than all others."
    heads = ["arrived", f"median, {measure.unit} (95 % interval)"]

    def texts(cell: FacetCell) -> list[str]:
        arrived = (~np.isnan(values[cell.rows])).sum()
        return [f"{arrived} of {len(cell.rows)}", estimate_text(facets.trials.median(measure, cell.rows))]

    return panels.figure(
        _NAMES[measure.kind], capital(measure.title), note, table=facets.table(heads, texts), legend=len(methods) > 1,
    )  # fmt: skip


def _trial_text(facets: Facets, measure: Measure, values: np.ndarray, row: int) -> str:
    levels = [f"{name} {level_name(facets.trials.column_of[name][row])}" for name in (*facets.pooled, "seed") if name]
    arrived = not np.isnan(values[row])
    said = f"{number_text(values[row])} {measure.unit}" if arrived else f"not arrived: {facets.trials.outcomes[row]}"
    return f"{said}<br>{', '.join(levels).replace('_', ' ')}"


def arrival_figure(facets: Facets) -> Figure | None:
    """Kaplan and Meier's curve of every method, in panels by level."""
    measure, trials = facets.measure, facets.trials
    times = trials.times(measure)
    if measure.kind == "throughput" or times.reached.sum() < 2 or len(trials) < 3:
        return None
    facets = facets.pool_down()
    levels = [facets.across_levels[at] for at in thin(len(facets.across_levels), _MOST_CURVE_PANELS)]
    titles = [f"{facets.across_title} {level_name(level)}" if facets.across else "" for level in levels]
    panels = Panels(titles, [120] * len(levels))
    table = [[*facets.head, "arrived", "half had arrived after, s (95 % interval)"]]
    finite = times.high[times.reached]
    logarithmic = finite.max() > 20 * finite.min()
    start, end = (float(finite.min()) * 0.8 if logarithmic else 0.0), float(finite.max()) * 1.05
    for index, level in enumerate(levels):
        for cell in (one for one in facets.cells() if one.across == level):
            curve = arrival_curve(times[cell.rows])
            last = curve.share[-1] if len(curve.share) else 0.0
            band = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in zip(curve.low, curve.high, strict=True)]
            panels.add(
                index, legend=cell.method, type="scatter", mode="lines", name=cell.method,
                x=numbers([start, *curve.at, end]), y=numbers(100 * np.array([0.0, *curve.share, last]), 4),
                line={"shape": "hv", "color": facets.colour(cell.method), "width": 2, "dash": facets.dash(cell.method)},
                customdata=["", *band, ""], hovertemplate="%{y:.0f} % after %{x:.4~g} s<br>%{customdata}",
            )  # fmt: skip
            table.append([*cell.names, f"{curve.arrived} of {curve.count}", estimate_text(curve.median)])
        panels.y(index, title={"text": "arrived (%)"}, range=[-3, 103], nticks=4)
    panels.x |= {"title": {"text": f"{measure.title} (s)"}}
    panels.x |= log_axis(start, end) if logarithmic else {"range": [0, end]}
    return panels.figure(
        "arrivals", "Which share of the runs had arrived by when",
        "Kaplan and Meier's estimate: further left and up is better. Runs that were stopped are censored then; diverged and "
        "crashed ones never arrive, so a curve may end below 100 %. Hovering shows 95 % intervals."
        + facets.pooled_note,
        table=table, legend=len(trials.methods) > 1,
    )  # fmt: skip


def efficiency_figure(facets: Facets) -> Figure | None:
    """Statistical against computational efficiency: time to the target is the product of both axes."""
    trials, measure = facets.trials, facets.measure
    if measure.kind == "throughput":
        return None
    times = trials.values(measure.column)
    steps = trials.values(trials.measure("steps", measure.percent).column)
    per_step_ms = 1e3 * times / np.where(steps > 0, steps, np.nan)
    known = ~np.isnan(per_step_ms)
    if not known.any():
        return None
    measured = [np.where(known, own, np.nan) for own in (steps, per_step_ms, times)]
    runs: list[dict[str, Any]] = []
    medians: list[dict[str, Any]] = []
    for method in trials.methods:
        rows = facets.rows(method)
        rows, colour = rows[known[rows]], facets.colour(method)
        runs.append(
            scatter(
                "markers", f"{method}, runs", steps[rows], per_step_ms[rows], legendgroup=method, showlegend=False,
                opacity=0.22, hoverinfo="skip", marker={"color": colour, "size": 4},
            )
        )  # fmt: skip
        cells = [one for one in facets.cells() if one.method == method and known[one.rows].any()]
        x, y, time_s = ([np.nanmedian(own[one.rows]) for one in cells] for own in measured)
        headed = [", ".join(map(" ".join, zip(facets.head[1:], one.names[1:], strict=True))) for one in cells]
        counts = [known[one.rows].sum() for one in cells]
        said = [f"{head}<br>{number_text(s)} s, {n} runs" for head, s, n in zip(headed, time_s, counts, strict=True)]
        symbols = [_SYMBOLS[facets.down_levels.index(one.down) % len(_SYMBOLS)] for one in cells]
        medians.append(
            scatter(
                "markers+text", method, x, y, text=[level_name(one.across) if facets.across else "" for one in cells],
                customdata=said, legendgroup=method, marker={"color": colour, "size": 9, "symbol": symbols},
                textposition="top right", textfont={"color": colour, "size": 10.5},
                hovertemplate="%{x:,.4~g} updates of %{y:.3~g} ms<br>%{customdata}",
            )
        )  # fmt: skip
    table = facets.table(
        ["updates", "ms per update", "time, s"], lambda cell: [median_text(own[cell.rows]) for own in measured]
    )
    (x_low, x_high), (y_low, y_high) = ((float(v[known].min()), float(v[known].max())) for v in (steps, per_step_ms))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"updates to {measure.goal}"}, **log_axis(x_low, x_high)},
        "yaxis": {"title": {"text": "time per update (ms)"}, **log_axis(y_low, y_high)},
        "shapes": [],
    }  # fmt: skip
    _equal_times(layout, x_low * 0.75, x_high * 1.3, y_low * 0.75, y_high * 1.3)
    at_marks = f" The number at a mark: {facets.across_title}." if facets.across else ""
    if facets.down:
        listed = [f"{level_name(level)} {symbol}" for level, symbol in zip(facets.down_levels, _SYMBOLS, strict=False)]
        at_marks += f" Symbols: {factor_text(facets.down)} {', '.join(listed)}."
    return Figure(
        "efficiency", "Updates needed against time per update",
        "Further left: better updates (statistical efficiency). Further down: faster ones (computational efficiency). On a "
        "dashed line time to the target is the same. Large marks are medians, small dots runs."
        + at_marks + facets.pooled_note,
        runs + medians, layout, table=table, height_px=420, legend=len(trials.methods) > 1,
    )  # fmt: skip


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
        y0, y1 = (1e3 * time_s / x for x in (x0, x1))
        layout["shapes"].append(dashed(f"{time_s:g} s", x0=x0, y0=y0, x1=x1, y1=y1, layer="below", opacity=0.5))


def speedup_figure(facets: Facets) -> Figure | None:
    """How many times sooner with more workers, of the same method; by pairs of equal seeds."""
    trials = facets.trials
    if "workers" not in trials.others or len(trials) < 2:
        return None
    first, *more = [level for level in trials.factors["workers"] if isinstance(level, int)]
    if not more:
        return None
    times = trials.times(facets.measure)
    levels = facets.down_levels
    panels = Panels([facets.panel_title(level) for level in levels], [190] * len(levels))
    table = [[*facets.head, "times as fast", "interval", "pairs"]]
    highest = max(1.0, max(more) / first if max(more) <= 8 * first else 1.0)
    hidden = False  # whether a ratio is unknown
    for index, level in enumerate(levels):
        ends: list[float] = []
        for method in trials.methods:
            points = [(first, 1.0, 1.0, 1.0, "")]
            where = {METHOD: method, **({facets.down: level} if facets.down else {})}
            for workers in more:
                base, other = trials.pairs("workers", first, workers, where)
                ratio = paired_ratio(*log_ratios(times[base], times[other]))
                if not ratio.pairs:
                    continue
                value, sure = _middle(ratio), ratio.method != "none"
                said = (times_text(ratio), interval_text(ratio))
                low, high = (ratio.low, ratio.high) if sure else (math.nan, math.nan)
                points.append((workers, value, low, high, f"{', '.join(said)}, {ratio.pairs} pairs"))
                names = [method, str(workers), *([level_name(level)] if facets.down else [])]
                table.append([*names, *said, str(ratio.pairs)])
                hidden = hidden or math.isnan(value)
            if len(points) == 1:
                continue
            x, y, lows, highs, text = map(list, zip(*points, strict=True))
            ends += [one for one in y if math.isfinite(one)]
            colour = facets.colour(method)
            panels.add(
                index, legend=method, type="scatter", mode="lines+markers", name=method, x=x, y=numbers(y), customdata=text,
                line={"color": colour, "width": 2, "dash": facets.dash(method)}, marker={"color": colour, "size": 6},
                error_y=error_bars(y, lows, highs, colour, thickness=1.2, width=3), hovertemplate="%{customdata}",
            )  # fmt: skip
        top = max([highest, *ends]) * 1.12
        reach = min(max(more) / first, top)
        panels.layout["shapes"].append(dashed(yref=axis_name(index), x0=first, x1=first * reach, y0=1, y1=reach))
        panels.y(index, title={"text": "times as fast"}, range=[0, top])
    if len(table) == 1:
        return None
    panels.x |= {
        "title": {"text": "workers"}, "tickvals": [first, *more],
        "range": [first - 0.1 * (max(more) - first), max(more) * 1.06],
    }  # fmt: skip
    timed = facets.measure.kind != "throughput"
    what = f"sooner to {facets.measure.goal} than" if timed else "as many samples per second as"
    return panels.figure(
        "speed-up", "What more workers bring",
        f"How many times {what} the same method with {workers_text(first)}: medians of pairs with equal seeds, 95 % "
        "intervals. Dashed: in proportion to the workers."
        + (" Missing marks: too many runs did not arrive." if hidden else "") + facets.pooled_note,
        table=table, legend=len(trials.methods) > 1,
    )  # fmt: skip


def _middle(ratio: Ratio) -> float:
    """The median ratio; where missing arrivals hide it, the bound that is known."""
    if math.isfinite(ratio.at_most) and ratio.at_least > 0:
        return math.sqrt(ratio.at_least * ratio.at_most)
    return ratio.at_least if ratio.at_least > 0 and math.isfinite(ratio.at_least) else math.nan
