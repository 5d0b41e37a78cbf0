"""A study's table for the terminal: the medians of each combination."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import rich.table

from paceline.observe.document import Cell, Table
from paceline.observe.terminal import shown
from paceline.observe.words import ABSENT, number_text
from paceline.study.rows import target_name

if TYPE_CHECKING:
    import pandas

__all__ = ["medians_table"]

_MEASURES = {
    "samples_per_s": "samples/s",
    "staleness_mean": "staleness",
    "waiting_share": "waiting",
    "train_loss": "final loss",
    "test_accuracy": "accuracy",
}


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
    return ABSENT if level is None or level != level else f"{level:g}" if isinstance(level, float) else str(level)


def _text(median: float) -> str:
    return ABSENT if math.isnan(median) else "not reached" if math.isinf(median) else number_text(float(median))
