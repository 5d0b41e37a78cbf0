"""The figures of a study: times, arrivals, efficiency, speed-up, staleness, outcomes and waiting, by method and level."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.observe.drawing import Figure, Panels, axis_name, dashed, error_bars, log_axis, numbers, scatter, thin
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.words import capital, number_text, percent_text, workers_text
from paceline.study.facets import FacetCell, Facets, estimate_text, facets_of, median_of
from paceline.study.findings import interval_text, times_text
from paceline.study.statistics import arrival_curve, log_ratios, paired_ratio, share_estimate
from paceline.study.table import quantile
from paceline.study.trials import METHOD, OUTCOMES, Measure, Trials, factor_text, level_name

_PANEL_PX = 190
_MOST_CURVE_PANELS = 4
_NAMES = {"time": "time-to-target", "steps": "updates-to-target", "throughput": "throughput"}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
_ROW_PX = 19
_MOST_BINS = 60
_PATTERNS = {"diverged": "/", "crashed": "x"}
_SHARES = {"gradient": "compute_share", "wait": "waiting_share", "apply": "apply_share", "input": "input_share"}


def box_figure(facets: Facets, measure: Measure) -> Figure | None:
    """One box per method and level; runs that did not reach the target count as later than all others."""
    values = facets.trials.values(measure.column)
    if np.isnan(values).all():
        return None
    levels, methods = facets.down_levels, facets.trials.methods
    panels = Panels([facets.panel_title(down) for down in levels], [_PANEL_PX] * len(levels))
    up = measure.kind == "throughput"

    def hover(row: int) -> str:
        arrived, columns = not np.isnan(values[row]), facets.trials.column_of
        said = (
            f"{number_text(values[row])} {measure.unit}" if arrived else f"not arrived: {facets.trials.outcomes[row]}"
        )
        factors = (f"{factor_text(one)} {level_name(columns[one][row])}" for one in (*facets.pooled, "seed"))
        return f"{said}<br>{', '.join(factors)}"

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
                customdata=[hover(row) for row in rows], hovertemplate="%{customdata}",
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


def arrival_figure(facets: Facets) -> Figure | None:
    """The Kaplan-Meier curve of every method, in panels by level."""
    measure, trials = facets.measure, facets.trials
    times = trials.times(measure)
    if measure.kind == "throughput" or times.reached.sum() < 2 or len(trials) < 3:
        return None
    facets = replace(facets, down=None, pooled=tuple(filter(None, (facets.down, *facets.pooled))))
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
        "arrivals", "Share of runs that had arrived over time",
        "The Kaplan-Meier estimate: further left and up is better. Stopped runs are censored when they stop; diverged and "
        "crashed runs never arrive, so a curve may end below 100 %. Hovering shows 95 % intervals."
        + facets.pooled_note,
        table=table, legend=len(trials.methods) > 1,
    )  # fmt: skip


def efficiency_figure(facets: Facets) -> Figure | None:
    """Statistical against computational efficiency: the time to the target is the product of both axes."""
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
        ["updates", "ms per update", "time, s"],
        lambda cell: [number_text(median_of(own[cell.rows])) for own in measured],
    )
    (x_low, x_high), (y_low, y_high) = ((float(v[known].min()), float(v[known].max())) for v in (steps, per_step_ms))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"updates to {measure.goal}"}, **log_axis(x_low, x_high)},
        "yaxis": {"title": {"text": "time per update (ms)"}, **log_axis(y_low, y_high)},
    }  # fmt: skip
    layout["shapes"] = _equal_times(x_low * 0.75, x_high * 1.3, y_low * 0.75, y_high * 1.3)
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


def _equal_times(x_low: float, x_high: float, y_low: float, y_high: float) -> list[dict[str, Any]]:
    """Dashed lines of equal time, at powers of ten and their halves, within the frame."""
    low_s, high_s = x_low * y_low / 1e3, x_high * y_high / 1e3
    decades = range(math.floor(math.log10(low_s)), math.ceil(math.log10(high_s)) + 1)
    times = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    shown = [one for one in times if low_s * 1.5 < one < high_s / 1.5]
    lines = []
    for time_s in shown[:: max(1, math.ceil(len(shown) / 7))]:
        x0, x1 = max(x_low, 1e3 * time_s / y_high), min(x_high, 1e3 * time_s / y_low)
        if x0 < x1:
            y0, y1 = (1e3 * time_s / x for x in (x0, x1))
            lines.append(dashed(f"{time_s:g} s", x0=x0, y0=y0, x1=x1, y1=y1, layer="below", opacity=0.5))
    return lines


def speedup_figure(facets: Facets) -> Figure | None:
    """Speed-up of each method with more workers, by pairs of equal seeds."""
    trials = facets.trials
    if "workers" not in trials.others or len(trials) < 2:
        return None
    first, *more = [level for level in trials.factors["workers"] if isinstance(level, int)]
    if not more:
        return None
    times, levels = trials.times(facets.measure), facets.down_levels
    panels = Panels([facets.panel_title(level) for level in levels], [_PANEL_PX] * len(levels))
    table = [[*facets.head, "times as fast", "interval", "pairs"]]
    highest = max(1.0, max(more) / first if max(more) <= 8 * first else 1.0)
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
                value, sure = ratio.middle, ratio.method != "none"
                said = (times_text(ratio), interval_text(ratio))
                low, high = (ratio.low, ratio.high) if sure else (math.nan, math.nan)
                points.append((workers, value, low, high, f"{', '.join(said)}, {ratio.pairs} pairs"))
                names = [method, str(workers), *([level_name(level)] if facets.down else [])]
                table.append([*names, *said, str(ratio.pairs)])
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
        "speed-up", "Speed-up with more workers",
        f"How many times {what} the same method with {workers_text(first)}: medians of pairs with equal seeds, 95 % "
        "intervals. Dashed: proportional to the number of workers."
        + (" Missing marks: too many runs did not arrive." if any(None in one["y"] for one in panels.traces) else "")
        + facets.pooled_note,
        table=table, legend=len(trials.methods) > 1,
    )  # fmt: skip


def staleness_figure(facets: Facets) -> Figure | None:
    """A heat map: one row per level, one column per staleness; shade is the share of updates."""
    texts = facets.trials.frame.get("staleness_histogram")
    if texts is None:
        return None
    loaded = [json.loads(text) if isinstance(text, str) and text else {} for text in texts.tolist()]
    histograms = [Counter({int(value): int(count) for value, count in one.items()}) for one in loaded]
    found = [(cell, sum((histograms[row] for row in cell.rows), Counter[int]())) for cell in facets.cells()]
    cells = [(cell, histogram) for cell, histogram in found if histogram]
    if not cells:
        return None
    lowest = min(0, *(min(one) for *_, one in cells))
    # A worker that loses its core for a while makes a few very stale updates, which share the last column.
    most = max(max(one) for *_, one in cells)
    highest = min(most, max(8, math.ceil(1.25 * max(quantile(one, 0.95) for *_, one in cells))))
    width = max(1, math.ceil((highest - lowest + 1) / _MOST_BINS))
    num_bins = max((highest - lowest) // width + 1, 2)
    firsts = [lowest + at * width for at in range(num_bins)]
    ranges = [str(first) if width == 1 else f"{first} to {first + width - 1}" for first in firsts]
    if most >= lowest + num_bins * width:
        ranges[-1] = f"{firsts[-1]} or more"
    shown = [method for method in facets.trials.methods if any(cell.method == method for cell, _ in cells)]
    panels = Panels(shown, [_ROW_PX * sum(cell.method == method for cell, _ in cells) + 4 for method in shown])
    table = [[*facets.head, "mean", "median", "95 %", "most"]]
    for index, method in enumerate(shown):
        names, shades, hovers = [], [], []
        for cell, histogram in (one for one in cells if one[0].method == method):
            total = sum(histogram.values())
            share = np.zeros(num_bins)
            for value, count in histogram.items():
                share[min((value - lowest) // width, num_bins - 1)] += count / total
            names.append(cell.row)
            shades.append(numbers(np.sqrt(share / share.max()), 3))
            hovers.append(
                [f"{percent_text(one)} of updates at staleness {at}" for one, at in zip(share, ranges, strict=True)]
            )
            mean = sum(value * count for value, count in histogram.items()) / total
            table.append([*cell.names, number_text(mean), *(str(quantile(histogram, q)) for q in (0.5, 0.95, 1.0))])
        panels.add(
            index, type="heatmap", name=method, x=[first + (width - 1) / 2 for first in firsts], y=names, z=shades,
            text=hovers, zmin=0, zmax=1, xgap=0.5, ygap=1.5, showscale=False,
            colorscale=[[0, "@grid"], [1, facets.colour(method)]], hovertemplate="%{y}: %{text}<extra></extra>",
        )  # fmt: skip
        panels.rows(index, names)
    panels.x |= {
        "title": {"text": "staleness (updates)"}, "showgrid": False, "range": [lowest - 0.6, lowest + num_bins * width - 0.4],
    }  # fmt: skip
    if highest - lowest < 12:
        panels.x["dtick"] = 1
    return panels.figure(
        "staleness", "How stale the applied gradients were",
        "The number of updates applied between a gradient's reading of the parameters and its own update. The stronger the "
        "colour, the larger the share of the row's updates; the last column includes all that are staler."
        + facets.rows_note + facets.pooled_note,
        table=table, legend=False,
    )  # fmt: skip


def outcome_figure(trials: Trials) -> Figure | None:
    """Outcomes of runs, one divided bar per level; by learning rate if it varies, because that makes runs diverge."""
    facets = facets_of(trials, down_first="learning_rate")
    seen = [outcome for outcome in OUTCOMES if (trials.outcomes == outcome).any()]
    failed_steps = trials.values("failed_step")

    def part(outcome: str, rows: np.ndarray) -> tuple[float | None, str]:
        mine = rows[trials.outcomes[rows] == outcome]
        when = (
            f", at update {number_text(step)} (median)" if (step := median_of(failed_steps[mine])) is not None else ""
        )
        return 100 * len(mine) / len(rows), f"{len(mine)} of {len(rows)} {outcome}{when}"

    panels = _stacked(facets, {one: one for one in seen}, part)
    panels.x["title"] = {"text": "share of the runs (%)"}

    def texts(cell: FacetCell) -> list[str]:
        total, failed = len(cell.rows), int(trials.failed[cell.rows].sum())
        good = share_estimate(total - failed, total)
        counts = [str((trials.outcomes[cell.rows] == one).sum()) for one in seen]
        return [*counts, f"{100 * good.low:.0f} to {100 * good.high:.0f} %"]

    return panels.figure(
        "outcomes", "How the runs ended",
        "Shares of the runs by outcome. Converged: reached the smallest target; stopped: reached a limit first; diverged: the "
        f"loss grew or was not finite; crashed: the run ended with an error.{facets.rows_note}" + facets.pooled_note,
        table=facets.table([*seen, "share without failure, 95 % interval"], texts),
    )  # fmt: skip


def waiting_figure(facets: Facets) -> Figure | None:
    """How workers spent their time: medians over each row's runs."""
    shares = {kind: facets.trials.values(column) for kind, column in _SHARES.items()}
    shares = {kind: values for kind, values in shares.items() if not np.isnan(values).all()}
    if "wait" not in shares:
        return None
    kinds = {kind: ACTIVITY_NAMES[kind] for kind in shares if kind == "wait" or "gradient" in shares}

    def part(kind: str, rows: np.ndarray) -> tuple[float | None, str]:
        median = median_of(shares[kind][rows])
        return (None, "") if median is None else (100 * median, f"{percent_text(median)} {kinds[kind]}")

    panels = _stacked(facets, kinds, part)
    panels.x |= {"title": {"text": "share of the workers' time (%)"}} if len(kinds) > 1 else {
        "title": {"text": "waiting (% of the workers' time)"}, "range": None, "rangemode": "tozero",
    }  # fmt: skip

    def texts(cell: FacetCell) -> list[str]:
        return [percent_text(median_of(shares[kind][cell.rows])) for kind in kinds]

    table = facets.table(list(kinds.values()), texts)
    note = f"Medians over runs. Blank: not accounted for.{facets.rows_note}{facets.pooled_note}"
    title = "Waiting for locks, for others and for input"
    return panels.figure("waiting", title, note, table=table, legend=len(kinds) > 1)


def _stacked(
    facets: Facets, kinds: dict[str, str], part: Callable[[str, np.ndarray], tuple[float | None, str]]
) -> Panels:
    """A panel per method with a bar per level; `part` gives a kind's length in percent and its hover text."""
    cells, methods = list(facets.cells()), facets.trials.methods
    panels = Panels(methods, [_ROW_PX * sum(cell.method == method for cell in cells) + 4 for method in methods])
    for index, method in enumerate(methods):
        mine = [cell for cell in cells if cell.method == method]
        names = [cell.row for cell in mine]
        for kind, name in kinds.items():
            lengths, hovers = zip(*(part(kind, cell.rows) for cell in mine), strict=True)
            pattern = {"shape": _PATTERNS.get(kind, ""), "size": 5, "fillmode": "overlay", "solidity": 0.25}
            panels.bars(
                index, kind, name, names, lengths, customdata=hovers, marker={"pattern": pattern},
                hovertemplate="%{y}: %{customdata}<extra></extra>",
            )  # fmt: skip
        panels.rows(index, names)
    panels.layout["barmode"] = "stack"
    panels.x["range"] = [0, 100]
    return panels
