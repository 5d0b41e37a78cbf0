"""Figures of time: boxes of time and updates to the target, and which share of runs had arrived by when."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.observe.drawing import Figure, Panels, log_axis, numbers, thin
from paceline.observe.words import capital, number_text
from paceline.study.facets import FacetCell, Facets, estimate_text, level_name
from paceline.study.statistics import arrival_curve
from paceline.study.trials import Measure

__all__ = ["arrival_figure", "box_figure"]

_PANEL_PX = 190
_MOST_CURVE_PANELS = 4
_NAMES = {"time": "time-to-target", "steps": "updates-to-target", "throughput": "throughput"}


def box_figure(facets: Facets, measure: Measure) -> Figure | None:
    """One box per method at every level; runs that never arrived count as later than all."""
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
    return Figure(
        _NAMES[measure.kind], capital(measure.title), note, panels.traces, panels.layout,
        *facets.data({measure.title: values}), table=_box_table(facets, measure, values),
        height_px=panels.height_px, legend=len(methods) > 1,
    )  # fmt: skip


def _trial_text(facets: Facets, measure: Measure, values: np.ndarray, row: int) -> str:
    levels = [f"{name} {level_name(facets.trials.column_of[name][row])}" for name in (*facets.pooled, "seed") if name]
    arrived = not np.isnan(values[row])
    said = f"{number_text(values[row])} {measure.unit}" if arrived else f"not arrived: {facets.trials.outcomes[row]}"
    return f"{said}<br>{', '.join(levels).replace('_', ' ')}"


def _box_table(facets: Facets, measure: Measure, values: np.ndarray) -> list[list[str]]:
    def texts(cell: FacetCell) -> list[str]:
        arrived = (~np.isnan(values[cell.rows])).sum()
        return [f"{arrived} of {len(cell.rows)}", estimate_text(facets.trials.median(measure, cell.rows))]

    return facets.table(["arrived", f"median, {measure.unit} (95 % interval)"], texts)


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
    data: list[list[Any]] = []
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
            points = np.stack([curve.at, curve.share, curve.low, curve.high], axis=1)
            data += [[*cell.names, *numbers(point)] for point in points]
            table.append([*cell.names, f"{curve.arrived} of {curve.count}", estimate_text(curve.median)])
        panels.y(index, title={"text": "arrived (%)"}, range=[-3, 103], nticks=4)
    panels.x |= {"title": {"text": f"{measure.title} (s)"}}
    panels.x |= log_axis(start, end) if logarithmic else {"range": [0, end]}
    return Figure(
        "arrivals", "Which share of the runs had arrived by when",
        "Kaplan and Meier's estimate: further left and up is better. Runs that were stopped are censored then; diverged and "
        "crashed ones never arrive, so a curve may end below 100 %. Hovering shows 95 % intervals."
        + facets.pooled_note,
        panels.traces, panels.layout, [*facets.head, "time (s)", "share", "low", "high"], data, table=table,
        height_px=panels.height_px, legend=len(trials.methods) > 1,
    )  # fmt: skip
