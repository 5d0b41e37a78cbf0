"""Figures of staleness, outcomes and time, for every method at every level."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np

from paceline.observe.drawing import Figure, Panels, numbers, rows_axis
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.words import number_text, percent_text
from paceline.study.facets import Facets, level_name, together
from paceline.study.rows import quantile
from paceline.study.statistics import share_estimate
from paceline.study.trials import OUTCOMES, factor_text

__all__ = ["outcome_figure", "staleness_figure", "waiting_figure"]

_ROW_PX = 19
_DOT = " \N{MIDDLE DOT} "
_MOST_BINS = 60
_SHARES = {"gradient": "compute_share", "wait": "waiting_share", "apply": "apply_share", "input": "input_share"}
_PATTERNS = {"diverged": "/", "crashed": "x"}


def staleness_figure(facets: Facets) -> Figure | None:
    """A heat map: one row per level, one column per staleness; shade is the share of updates."""
    texts = facets.trials.frame.get("staleness_histogram")
    if texts is None:
        return None
    histograms = [json.loads(text) if isinstance(text, str) and text else {} for text in texts.tolist()]
    cells = [
        (method, across, down, _sum([histograms[row] for row in rows])) for method, across, down, rows in facets.cells()
    ]
    cells = [cell for cell in cells if cell[3]]
    if not cells:
        return None
    lowest = min(0, *(min(one) for *_, one in cells))
    # A worker that lost its core for a while makes a few updates that are very stale: they share the last column.
    most = max(max(one) for *_, one in cells)
    highest = min(most, max(8, math.ceil(1.25 * max(quantile(one, 0.95) for *_, one in cells))))
    width = max(1, math.ceil((highest - lowest + 1) / _MOST_BINS))
    num_bins = max((highest - lowest) // width + 1, 2)
    firsts = [lowest + at * width for at in range(num_bins)]
    ranges = [str(first) if width == 1 else f"{first} to {first + width - 1}" for first in firsts]
    if most >= lowest + num_bins * width:
        ranges[-1] = f"{firsts[-1]} or more"
    shown = [method for method in facets.trials.methods if any(cell[0] == method for cell in cells)]
    panels = Panels(shown, [_ROW_PX * sum(cell[0] == method for cell in cells) + 4 for method in shown])
    data: list[list[Any]] = []
    table = [[*facets.head(), "mean", "median", "95 %", "most"]]
    for index, method in enumerate(shown):
        names, shades, hovers = [], [], []
        for _, across, down, histogram in (cell for cell in cells if cell[0] == method):
            total = sum(histogram.values())
            share = np.zeros(num_bins)
            for value, count in histogram.items():
                share[min((value - lowest) // width, num_bins - 1)] += count / total
            names.append(_row_name(facets, across, down))
            shades.append(numbers(np.sqrt(share / share.max()), 3))
            hovers.append(
                [f"{percent_text(one)} of updates at staleness {at}" for one, at in zip(share, ranges, strict=True)]
            )
            mean = sum(value * count for value, count in histogram.items()) / total
            cell_names = facets.names(method, across, down)
            data += [[*cell_names, value, count] for value, count in sorted(histogram.items())]
            table.append([*cell_names, number_text(mean), *(str(quantile(histogram, q)) for q in (0.5, 0.95, 1.0))])
        panels.add(
            index, type="heatmap", name=method, x=[first + (width - 1) / 2 for first in firsts], y=names, z=shades,
            text=hovers, zmin=0, zmax=1, xgap=0.5, ygap=1.5, showscale=False,
            colorscale=[[0, "@grid"], [1, facets.colour(method)]], hovertemplate="%{y}: %{text}<extra></extra>",
        )  # fmt: skip
        panels.y(index, **rows_axis(names), tickvals=names)
    panels.x |= {
        "title": {"text": "staleness (updates)"}, "showgrid": False, "range": [lowest - 0.6, lowest + num_bins * width - 0.4],
    }  # fmt: skip
    if highest - lowest < 12:
        panels.x["dtick"] = 1
    return Figure(
        "staleness", "How stale the applied gradients were",
        "How many updates others had applied between a gradient's reading of the parameters and its own update. The "
        "stronger the colour, the more of the row's updates; the last column has all that are staler."
        + _rows_note(facets) + facets.pooled_note,
        panels.traces, panels.layout, [*facets.head(), "staleness", "updates"], rows=data, table=table,
        height_px=panels.height_px, legend=False,
    )  # fmt: skip


def outcome_figure(facets: Facets) -> Figure | None:
    """How runs ended over two factors: one small bar per cell, divided as the runs were."""
    trials = facets.trials
    factors = [name for name in ("workers", "learning_rate") if name in trials.others]
    factors = list(dict.fromkeys([*factors, *(name for name in (facets.across, facets.down, *trials.others) if name)]))[
        :2
    ]
    across, down = [*factors, None, None][:2]
    columns = trials.factors[across] if across else [None]
    lines = trials.factors[down] if down else [None]
    panels = Panels(trials.methods, [(_ROW_PX + 3) * len(lines) + 4] * len(trials.methods))
    seen = [outcome for outcome in OUTCOMES if (trials.outcomes == outcome).any()]
    heads = ["method", *(factor_text(name) for name in factors), *seen]
    table: list[list[str]] = []
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
                    said = f"{count} of {total} {outcome}{_when(facets, rows & (trials.outcomes == outcome))}"
                    for values, value in zip(
                        bars[outcome].values(), (round(begin, 5), round(length, 5), name, said), strict=True
                    ):
                        values.append(value)
                    begin += length
                if total:
                    levels = [level_name(level) for level, factor in ((column, across), (line, down)) if factor]
                    good = share_estimate(total - int(trials.failed[rows].sum()), total)
                    interval = f"{100 * good.low:.0f} to {100 * good.high:.0f} %"
                    table.append([method, *levels, *(str(counts[one]) for one in seen), interval])
        for outcome, bar in bars.items():
            marker: dict[str, Any] = {"color": f"@{outcome}", "line": {"width": 0}}
            if pattern := _PATTERNS.get(outcome):
                marker["pattern"] = {"shape": pattern, "size": 5, "fillmode": "overlay", "solidity": 0.25}
            panels.add(
                index, legend=outcome, **bar, type="bar", orientation="h", name=outcome, width=0.8, marker=marker,
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
        panels.y(index, **rows_axis(names), tickvals=names, title={"text": factor_text(down) if down else ""})
    panels.layout["barmode"] = "overlay"
    panels.x |= {
        "title": {"text": factor_text(across) if across else ""}, "range": [-0.55, len(columns) - 0.45], "showgrid": False,
        "tickvals": list(range(len(columns))), "ticktext": [level_name(level) if across else "all" for level in columns],
    }  # fmt: skip
    return Figure(
        "outcomes", "How the runs ended",
        "Each bar is divided as its runs were. Converged: reached the smallest target; stopped: a limit came first; diverged: "
        "the loss grew or was no number; crashed: the run ended with an error."
        + together([name for name in trials.others if name not in factors]),
        panels.traces, panels.layout, [*heads, "95 % interval of ending well"], rows=table,
        table=[[*heads, "share that ended well, 95 % interval"], *table], height_px=panels.height_px,
    )  # fmt: skip


def _when(facets: Facets, rows: np.ndarray) -> str:
    """The median update at which runs failed, as hover text."""
    step = _median(facets.trials.values("failed_step")[rows])
    return "" if step is None else f", at update {number_text(step)} (median)"


def waiting_figure(facets: Facets) -> Figure | None:
    """What workers did with their time: medians over the runs of each row."""
    trials = facets.trials
    shares = {kind: trials.values(column) for kind, column in _SHARES.items()}
    shares = {kind: values for kind, values in shares.items() if not np.isnan(values).all()}
    if "wait" not in shares:
        return None
    kinds = list(shares) if "gradient" in shares else ["wait"]
    cells = list(facets.cells())
    panels = Panels(trials.methods, [_ROW_PX * sum(cell[0] == one for cell in cells) + 4 for one in trials.methods])
    table = [[*facets.head(), *(ACTIVITY_NAMES[kind] for kind in kinds)]]
    for index, method in enumerate(trials.methods):
        mine = [cell for cell in cells if cell[0] == method]
        names = [_row_name(facets, across, down) for _, across, down, _ in mine]
        medians = {kind: [_median(shares[kind][rows]) for *_, rows in mine] for kind in kinds}
        for kind, values in medians.items():
            panels.add(
                index, legend=kind, type="bar", orientation="h", name=ACTIVITY_NAMES[kind], width=0.78, y=names,
                x=numbers([math.nan if one is None else 100 * one for one in values], 4),
                marker={"color": f"@{kind}", "line": {"width": 0}},
                hovertemplate=f"%{{y}}: %{{x:.1f}} % {ACTIVITY_NAMES[kind]}<extra></extra>",
            )  # fmt: skip
        panels.y(index, **rows_axis(names), tickvals=names)
        for at, (_, across, down, _) in enumerate(mine):
            table.append([*facets.names(method, across, down), *(percent_text(medians[kind][at]) for kind in kinds)])
    panels.layout["barmode"] = "stack"
    panels.x |= {"title": {"text": "share of the workers' time (%)"}, "range": [0, 100]} if len(kinds) > 1 else {
        "title": {"text": "waiting (% of the workers' time)"}, "rangemode": "tozero",
    }  # fmt: skip
    return Figure(
        "waiting", "Waiting for locks, for others and for input",
        f"Medians over runs. Blank: not accounted for.{_rows_note(facets)}" + facets.pooled_note,
        panels.traces, panels.layout, *facets.data({f"{kind} share": shares[kind] for kind in kinds}), table=table,
        height_px=panels.height_px, legend=len(kinds) > 1,
    )  # fmt: skip


def _median(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _sum(histograms: list[dict[str, Any]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(value): int(count) for value, count in histogram.items()})
    return dict(total)


def _row_name(facets: Facets, across: Any, down: Any) -> str:
    levels = ((down, facets.down), (across, facets.across))
    return _DOT.join(level_name(level) for level, factor in levels if factor) or " "


def _rows_note(facets: Facets) -> str:
    named = [factor_text(factor) for factor in (facets.down, facets.across) if factor]
    return f" Rows: {_DOT.join(named)}." if named else ""
