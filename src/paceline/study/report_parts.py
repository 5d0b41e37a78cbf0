"""The tables of a study's report: the methods at a glance, findings, comparisons, versions and machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.document import Cell, Table
from paceline.observe.drawing import method_colour
from paceline.observe.words import ABSENT, percent_text
from paceline.study.facets import estimate_text, median_text
from paceline.study.findings import Comparison, interval_text, times_text
from paceline.study.statistics import share_estimate
from paceline.study.trials import METHOD, Trials, level_text

__all__ = ["comparisons_table", "environment", "findings", "glance_table", "read_text"]

_MOST_FINDINGS = 12
_AT_A_GLANCE = (  # name, unit, column, factor
    ("throughput", "samples/s", "samples_per_s", 1),
    ("staleness", "mean", "staleness_mean", 1),
    ("waiting", "% of time", "waiting_share", 100),
    ("accuracy", "test, %", "test_accuracy", 100),
)


def glance_table(trials: Trials) -> Table:
    """One row per method."""
    measure = trials.primary
    timed = measure.kind != "throughput"
    steps = trials.values(trials.measure("steps", measure.percent).column)
    times = trials.times(measure)
    others = [one for one in _AT_A_GLANCE if not np.isnan(trials.values(one[2])).all()]
    heads = [Cell("method", kind="name"), Cell("trials")]
    if timed:
        heads += [Cell("arrived"), Cell(measure.title, "s, median (95 % interval)"), Cell("updates")]
    heads += [*(Cell(name, unit) for name, unit, *_ in others), Cell("failed", "95 % interval")]
    rows = []
    for index, method in enumerate(trials.methods):
        mine = trials.method_of == method
        total = int(mine.sum())
        cells = [str(total)]
        if timed:
            cells += [
                str(times.reached[mine].sum()),
                estimate_text(trials.median(measure, mine)),
                median_text(steps[mine]),
            ]
        cells += [median_text(scale * trials.values(column)[mine]) for *_, column, scale in others]
        failed = int(trials.failed[mine].sum())
        share = share_estimate(failed, total)
        cells.append(f"{failed} ({percent_text(share.low)} to {percent_text(share.high)})" if failed else "0")
        rows.append([Cell(method, colour=method_colour(index)), *cells])
    return Table(rows, heads, kind="figures-table")


def findings(found: Sequence[Comparison], baseline: str) -> list[Comparison]:
    """The first of them, the most general first."""

    def key(one: Comparison) -> tuple[Any, ...]:
        return one.factor != METHOD, len(one.where), baseline not in (one.base, one.other), -one.leading.centre

    return sorted(found, key=key)[:_MOST_FINDINGS]


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """One comparison a row; findings are bold."""
    names, figures = ("sooner", "than", "where"), ("ratio", "95 % interval", "pairs", "both\narrived", "adjusted\np")
    rows = []
    for one in comparisons:
        shown, found = one.leading, "found" if one.found else ""
        where = ", ".join(level_text(factor, level) for factor, level in one.where) or "everywhere"
        known = one.ratio.at_least >= 1 or one.ratio.at_most <= 1
        texts = [
            times_text(shown.ratio) if known else "not known", interval_text(shown.ratio).removeprefix("95 % interval "),
            str(one.ratio.pairs), str(one.ratio.complete), _p_text(one),
        ]  # fmt: skip
        first, second = (level_text(one.factor, level) for level in (shown.other, shown.base))
        named = [Cell(text, kind=f"name {found}") for text in (second, where)]
        rows.append([Cell(first, kind=found), *named, *(Cell(text, kind=found) for text in texts)])
    return Table(rows, [*(Cell(one, kind="name") for one in names), *figures])


def _p_text(one: Comparison) -> str:
    if not one.testable:
        return ABSENT
    return "<0.001" if one.adjusted_p < 0.001 else f"{one.adjusted_p:.3f}"


def environment(trials: Trials) -> dict[str, str]:
    """Versions and machines of all trials."""
    columns = trials.frame.filter(regex=r"^environment\.")
    return {
        str(name).removeprefix("environment."): ", ".join(dict.fromkeys(map(str, column)))
        for name, column in columns.items()
    }


def read_text(path: Path) -> str:
    """A file's text, nothing if there is no such file."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
