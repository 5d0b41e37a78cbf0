"""Figures in cells: how stale updates were, how runs ended, and where time went, for every method at every level."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from paceline.observe.compare import number_text, percent_text
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.panels import Figure, axis_name, panels
from paceline.study.statistics import share_estimate
from paceline.study.trials import OUTCOMES, factor_text
from paceline.study.view import Drawn, View, level_name

__all__ = ["outcome_figure", "staleness_figure", "waiting_figure"]

_ROW_PX = 19
_DOT = " \N{MIDDLE DOT} "
_MOST_BINS = 60
_SHARES = {"gradient": "compute_share", "wait": "waiting_share", "apply": "apply_share", "input": "input_share"}


def staleness_figure(view: View) -> Drawn | None:
    """A heat map: one row per level, one column per staleness; shade is the share of updates."""
    texts = view.trials.frame.get("staleness_histogram")
    if texts is None:
        return None
    histograms = [json.loads(text) if isinstance(text, str) and text else {} for text in texts.tolist()]
    cells = [
        (method, across, down, _sum([histograms[row] for row in rows])) for method, across, down, rows in view.cells()
    ]
    cells = [cell for cell in cells if cell[3]]
    if not cells:
        return None
    lowest = min(0, *(min(one) for *_, one in cells))
    # A worker that lost its core for a while makes a few updates that are very stale: they share the last column.
    most = max(max(one) for *_, one in cells)
    highest = min(most, max(8, math.ceil(1.25 * max(_quantile(one, 0.95) for *_, one in cells))))
    width = max(1, math.ceil((highest - lowest + 1) / _MOST_BINS))
    num_bins = max((highest - lowest) // width + 1, 2)
    shown = [method for method in view.trials.methods if any(cell[0] == method for cell in cells)]
    sizes = [_ROW_PX * sum(cell[0] == method for cell in cells) + 4 for method in shown]
    layout, height = panels(shown, sizes)
    traces: list[dict[str, Any]] = []
    data: list[list[Any]] = []
    table: list[list[str]] = []
    centres = [lowest + (at + (1 - 1 / width) / 2) * width for at in range(num_bins)]
    ranges = [
        str(lowest + at * width) if width == 1 else f"{lowest + at * width} to {lowest + (at + 1) * width - 1}"
        for at in range(num_bins)
    ]
    if most >= lowest + num_bins * width:
        ranges[-1] = f"{lowest + (num_bins - 1) * width} or more"
    for index, method in enumerate(shown):
        names, shades, hovers = [], [], []
        for _, across, down, histogram in (cell for cell in cells if cell[0] == method):
            total = sum(histogram.values())
            share = np.zeros(num_bins)
            for value, count in histogram.items():
                share[min((value - lowest) // width, num_bins - 1)] += count / total
            names.append(_row_name(view, across, down))
            shades.append([float(f"{one:.3g}") for one in np.sqrt(share / share.max())])
            hovers.append(
                [
                    f"{percent_text(float(one))} of updates at staleness {at}"
                    for one, at in zip(share, ranges, strict=True)
                ]
            )
            mean = sum(value * count for value, count in histogram.items()) / total
            cell_names = view.names(method, across, down)
            data += [[*cell_names, value, count] for value, count in sorted(histogram.items())]
            table.append(
                [*cell_names, number_text(float(mean)), *(str(_quantile(histogram, q)) for q in (0.5, 0.95, 1.0))]
            )
        traces.append(
            {
                "type": "heatmap", "name": method, "yaxis": axis_name(index), "x": centres, "y": names, "z": shades,
                "text": hovers, "zmin": 0, "zmax": 1, "xgap": 0.5, "ygap": 1.5, "showscale": False,
                "colorscale": [[0, "@grid"], [1, view.colour(method)]], "hovertemplate": "%{y}: %{text}<extra></extra>",
                "showlegend": False,
            }
        )  # fmt: skip
        layout[f"yaxis{index + 1 if index else ''}"] |= _rows_axis(names)
    layout["xaxis"] |= {
        "title": {"text": "staleness (updates)"}, "showgrid": False, "range": [lowest - 0.6, lowest + num_bins * width - 0.4],
    }  # fmt: skip
    if highest - lowest < 12:
        layout["xaxis"]["dtick"] = 1
    figure = Figure(
        "staleness", "How stale the applied gradients were",
        "How many updates others had applied between a gradient's reading of the parameters and its own update. The "
        "stronger the colour, the more of the row's updates; the last column has all that are staler."
        + _rows_note(view) + view.pooled_note,
        traces, layout, [(name, "") for name in [*view.head(), "staleness", "updates"]], height_px=height,
        legend=False, rows=data,
    )  # fmt: skip
    return Drawn(figure, [*view.head(), "mean", "median", "95 %", "most"], table)


def outcome_figure(view: View) -> Drawn | None:
    """How runs ended over two factors: one small bar per cell, divided as the runs were."""
    trials = view.trials
    factors = [name for name in ("workers", "learning_rate") if name in trials.others]
    factors = list(dict.fromkeys([*factors, *(name for name in (view.across, view.down, *trials.others) if name)]))[:2]
    across, down = [*factors, None, None][:2]
    columns = trials.factors[across] if across else [None]
    lines = trials.factors[down] if down else [None]
    layout, height = panels(trials.methods, [(_ROW_PX + 3) * len(lines) + 4] * len(trials.methods))
    traces: list[dict[str, Any]] = []
    table: list[list[str]] = []
    seen = [outcome for outcome in OUTCOMES if (trials.outcomes == outcome).any()]
    names = [level_name(level) if down else "" for level in lines]
    for index, method in enumerate(trials.methods):
        bars: dict[str, dict[str, list[Any]]] = {one: {"base": [], "x": [], "y": [], "customdata": []} for one in seen}
        for at, column in enumerate(columns):
            for line, name in zip(lines, names, strict=True):
                where = {"method": method, across: column, down: line}
                rows = trials.rows({k: v for k, v in where.items() if k is not None and v is not None})
                total = int(rows.sum())
                begin = at - 0.46
                counts = {one: int((trials.outcomes[rows] == one).sum()) for one in seen}
                for outcome, count in counts.items():
                    if not count:
                        continue
                    length = 0.92 * count / total
                    for key, value in zip(("base", "x", "y"), (round(begin, 5), round(length, 5), name), strict=True):
                        bars[outcome][key].append(value)
                    bars[outcome]["customdata"].append(
                        f"{count} of {total} {outcome}{_when(view, rows & (trials.outcomes == outcome))}"
                    )
                    begin += length
                if total:
                    levels = [level_name(level) for level, factor in ((column, across), (line, down)) if factor]
                    good = share_estimate(total - int(trials.failed[rows].sum()), total)
                    table.append(
                        [
                            method,
                            *levels,
                            *(str(counts[one]) for one in seen),
                            f"{100 * good.low:.0f} to {100 * good.high:.0f} %",
                        ]
                    )
        for outcome, bar in bars.items():
            pattern = {"diverged": "/", "crashed": "x"}.get(outcome, "")
            marker: dict[str, Any] = {"color": f"@{outcome}", "line": {"width": 0}}
            if pattern:
                marker["pattern"] = {"shape": pattern, "size": 5, "fillmode": "overlay", "solidity": 0.25}
            traces.append(
                {
                    **bar, "type": "bar", "orientation": "h", "name": outcome, "legendgroup": outcome,
                    "showlegend": index == 0, "yaxis": axis_name(index), "width": 0.8, "marker": marker,
                    "hovertemplate": "%{customdata}<extra></extra>",
                }
            )  # fmt: skip
        layout[f"yaxis{index + 1 if index else ''}"] |= {
            **_rows_axis(names),
            "title": {"text": factor_text(down) if down else ""},
        }
    layout["barmode"] = "overlay"
    layout["xaxis"] |= {
        "title": {"text": factor_text(across) if across else ""}, "range": [-0.55, len(columns) - 0.45], "showgrid": False,
        "tickvals": list(range(len(columns))), "ticktext": [level_name(level) if across else "all" for level in columns],
    }  # fmt: skip
    others = [name for name in trials.others if name not in (across, down)]
    together = f" All levels of {' and '.join(map(factor_text, others))} together." if others else ""
    counts_head = [*(factor_text(name) for name in (across, down) if name), *seen]
    figure = Figure(
        "outcomes", "How the runs ended",
        "Each bar is divided as its runs were. Converged: reached the smallest target; stopped: a limit came first; diverged: "
        "the loss grew or was no number; crashed: the run ended with an error." + together,
        traces, layout, [(name, "") for name in ["method", *counts_head, "95 % interval of ending well"]], height_px=height,
        rows=[list(row) for row in table],
    )  # fmt: skip
    return Drawn(figure, ["method", *counts_head, "share that ended well, 95 % interval"], table)


def _when(view: View, rows: np.ndarray) -> str:
    """At which update runs failed, for hovering."""
    steps = view.trials.values("failed_step")[rows]
    steps = steps[~np.isnan(steps)]
    return f", at update {number_text(float(np.median(steps)))} (median)" if len(steps) else ""


def waiting_figure(view: View) -> Drawn | None:
    """What workers did with their time: medians over the runs of each row."""
    shares = {kind: view.trials.values(column) for kind, column in _SHARES.items()}
    shares = {kind: values for kind, values in shares.items() if not np.isnan(values).all()}
    if "wait" not in shares:
        return None
    cells = list(view.cells())
    layout, height = panels(
        view.trials.methods, [_ROW_PX * sum(c[0] == m for c in cells) + 4 for m in view.trials.methods]
    )
    traces: list[dict[str, Any]] = []
    table: list[list[str]] = []
    kinds = ["gradient", "wait", "apply", "input"] if "gradient" in shares else ["wait"]
    kinds = [kind for kind in kinds if kind in shares]
    for index, method in enumerate(view.trials.methods):
        mine = [cell for cell in cells if cell[0] == method]
        names = [_row_name(view, across, down) for _, across, down, _ in mine]
        for kind in kinds:
            medians = [_median(shares[kind][rows]) for *_, rows in mine]
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": ACTIVITY_NAMES[kind], "legendgroup": kind,
                    "showlegend": index == 0, "yaxis": axis_name(index), "width": 0.78, "y": names,
                    "x": [None if math.isnan(one) else float(f"{100 * one:.4g}") for one in medians],
                    "marker": {"color": f"@{kind}", "line": {"width": 0}},
                    "hovertemplate": f"%{{y}}: %{{x:.1f}} % {ACTIVITY_NAMES[kind]}<extra></extra>",
                }
            )  # fmt: skip
        layout[f"yaxis{index + 1 if index else ''}"] |= _rows_axis(names)
        for _, across, down, rows in mine:
            texts = [percent_text(None if math.isnan(one := _median(shares[kind][rows])) else one) for kind in kinds]
            table.append([*view.names(method, across, down), *texts])
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"title": {"text": "share of the workers' time (%)"}, "range": [0, 100]} if len(kinds) > 1 else {
        "title": {"text": "waiting (% of the workers' time)"}, "rangemode": "tozero",
    }  # fmt: skip
    data = [[*view.trial_cells(row), *(_plain(shares[kind][row]) for kind in kinds)] for row in range(len(view.trials))]
    figure = Figure(
        "waiting", "Waiting for locks, for others and for input",
        f"Medians over runs. Blank: not accounted for.{_rows_note(view)}" + view.pooled_note,
        traces, layout, [(name, "") for name in [*view.trial_columns(), *(f"{kind} share" for kind in kinds)]],
        height_px=height, legend=len(kinds) > 1, rows=data,
    )  # fmt: skip
    return Drawn(figure, [*view.head(), *(ACTIVITY_NAMES[kind] for kind in kinds)], table)


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def _sum(histograms: list[dict[str, Any]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] = total.get(int(value), 0) + int(count)
    return total


def _quantile(histogram: dict[int, int], q: float) -> int:
    values = sorted(histogram)
    counts = np.cumsum([histogram[value] for value in values])
    return values[int(np.searchsorted(counts, q * counts[-1] * (1 - 1e-12)))]


def _row_name(view: View, across: Any, down: Any) -> str:
    return _DOT.join(level_name(level) for level, factor in ((down, view.down), (across, view.across)) if factor) or " "


def _rows_note(view: View) -> str:
    named = [factor_text(factor) for factor in (view.down, view.across) if factor]
    return f" Rows: {_DOT.join(named)}." if named else ""


def _rows_axis(names: list[str]) -> dict[str, Any]:
    return {
        "type": "category", "categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.5, -0.5],
        "showgrid": False, "ticks": "", "tickmode": "array", "tickvals": names,
    }  # fmt: skip
