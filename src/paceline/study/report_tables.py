"""A study's tables: the methods at a glance, comparisons and the machine on its page, medians in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.table

from paceline.observe.document import Cell, Table
from paceline.observe.drawing import method_colour
from paceline.observe.terminal import shown
from paceline.observe.words import ABSENT, number_text, percent_text
from paceline.study.facets import estimate_text, median_text
from paceline.study.findings import Comparison, interval_text, times_text
from paceline.study.statistics import share_estimate
from paceline.study.table import target_name
from paceline.study.trials import METHOD, Trials, level_name, level_text

if TYPE_CHECKING:
    import pandas

_MOST_FINDINGS = 12
_AT_A_GLANCE = (  # name, unit, column, factor
    ("throughput", "samples/s", "samples_per_s", 1),
    ("staleness", "mean", "staleness_mean", 1),
    ("waiting", "% of time", "waiting_share", 100),
    ("accuracy", "test, %", "test_accuracy", 100),
)
_MEASURES = {
    "samples_per_s": "samples/s",
    "staleness_mean": "staleness",
    "waiting_share": "waiting",
    "train_loss": "final loss",
    "test_accuracy": "accuracy",
}


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
    """A file's text; empty if the file does not exist."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def medians_table(table: pandas.DataFrame, *, target: float, title: str) -> rich.table.Table:
    """One row per combination; a trial that did not reach the target counts as infinitely late in its median."""
    factors = [str(name) for name in table.columns if str(name).startswith("factor.") and name != "factor.seed"]
    varying = [one for one in factors if len(table[one].drop_duplicates()) > 1] or factors[:1]
    name = target_name(target)
    late = {f"time_to_{name}_s": f"s to {name} %", f"steps_to_{name}": f"steps to {name} %"}
    known = table.columns[table.notna().any()]
    heads = {column: head for column, head in (late | _MEASURES).items() if column in known}
    grouped: Any = table.fillna(dict.fromkeys(late, math.inf)).groupby(varying, dropna=False)
    medians = grouped[list(heads)].median()
    outcomes = grouped["outcome"].agg(lambda own: ", ".join(f"{n} {one}" for one, n in own.value_counts().items()))
    rows = [
        [*map(_level, levels if isinstance(levels, tuple) else (levels,)), outcomes.loc[levels], *map(_text, row)]
        for levels, row in zip(medians.index, medians.to_numpy(), strict=True)
    ]
    names = [one.removeprefix("factor.").removeprefix("algorithm.") for one in varying]
    return shown(Table(rows, [*(Cell(one, kind="name") for one in (*names, "outcomes")), *heads.values()]), title)


def _level(level: Any) -> str:
    return ABSENT if level is None or level != level else level_name(level)


def _text(median: float) -> str:
    return ABSENT if math.isnan(median) else "not reached" if math.isinf(median) else number_text(float(median))
