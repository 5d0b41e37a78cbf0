"""Figures of staleness, outcomes and time, for every method at every level."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paceline.observe.drawing import Figure, Panels, numbers
from paceline.observe.palette import ACTIVITY_NAMES
from paceline.observe.words import number_text, percent_text
from paceline.study.facets import FacetCell, Facets, facets_of
from paceline.study.statistics import share_estimate
from paceline.study.table import quantile
from paceline.study.trials import OUTCOMES, Trials

_ROW_PX = 19
_MOST_BINS = 60
_SHARES = {"gradient": "compute_share", "wait": "waiting_share", "apply": "apply_share", "input": "input_share"}
_PATTERNS = {"diverged": "/", "crashed": "x"}
_Part = tuple[float | None, str]  # a bar's length in percent, and what hovering shows


def staleness_figure(facets: Facets) -> Figure | None:
    """A heat map: one row per level, one column per staleness; shade is the share of updates."""
    texts = facets.trials.frame.get("staleness_histogram")
    if texts is None:
        return None
    histograms = [json.loads(text) if isinstance(text, str) and text else {} for text in texts.tolist()]
    found = [(cell, _sum(histograms[row] for row in cell.rows)) for cell in facets.cells()]
    cells = [(cell, histogram) for cell, histogram in found if histogram]
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
        "How many updates others had applied between a gradient's reading of the parameters and its own update. The "
        "stronger the colour, the more of the row's updates; the last column has all that are staler."
        + facets.rows_note + facets.pooled_note,
        table=table, legend=False,
    )  # fmt: skip


def outcome_figure(trials: Trials) -> Figure | None:
    """How runs ended: one bar per level, divided as its runs were; of two factors rather those that make runs diverge."""
    facets = facets_of(trials, down_first="learning_rate")
    seen = [outcome for outcome in OUTCOMES if (trials.outcomes == outcome).any()]
    failed_steps = trials.values("failed_step")

    def part(outcome: str, rows: np.ndarray) -> _Part:
        mine = rows[trials.outcomes[rows] == outcome]
        step = _median(failed_steps[mine])
        when = "" if step is None else f", at update {number_text(step)} (median)"
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
        "Each bar is divided as its runs were. Converged: reached the smallest target; stopped: a limit came first; diverged: "
        f"the loss grew or was no number; crashed: the run ended with an error.{facets.rows_note}" + facets.pooled_note,
        table=facets.table([*seen, "share that ended well, 95 % interval"], texts),
    )  # fmt: skip


def waiting_figure(facets: Facets) -> Figure | None:
    """How workers spent their time: medians over the runs of each row."""
    shares = {kind: facets.trials.values(column) for kind, column in _SHARES.items()}
    shares = {kind: values for kind, values in shares.items() if not np.isnan(values).all()}
    if "wait" not in shares:
        return None
    kinds = {kind: ACTIVITY_NAMES[kind] for kind in shares if kind == "wait" or "gradient" in shares}

    def part(kind: str, rows: np.ndarray) -> _Part:
        median = _median(shares[kind][rows])
        return (None, "") if median is None else (100 * median, f"{percent_text(median)} {kinds[kind]}")

    panels = _stacked(facets, kinds, part)
    panels.x |= {"title": {"text": "share of the workers' time (%)"}} if len(kinds) > 1 else {
        "title": {"text": "waiting (% of the workers' time)"}, "range": None, "rangemode": "tozero",
    }  # fmt: skip
    table = facets.table(
        list(kinds.values()), lambda cell: [percent_text(_median(shares[kind][cell.rows])) for kind in kinds]
    )
    return panels.figure(
        "waiting", "Waiting for locks, for others and for input",
        f"Medians over runs. Blank: not accounted for.{facets.rows_note}" + facets.pooled_note,
        table=table, legend=len(kinds) > 1,
    )  # fmt: skip


def _stacked(facets: Facets, kinds: dict[str, str], part: Callable[[str, np.ndarray], _Part]) -> Panels:
    """A panel per method, and in it a bar per level, made of a part of each kind."""
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


def _median(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _sum(histograms: Iterable[dict[str, Any]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(value): int(count) for value, count in histogram.items()})
    return dict(total)
