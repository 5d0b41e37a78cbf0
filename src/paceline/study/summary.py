"""A study's table for the terminal: the medians of each combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from paceline.observe.words import ABSENT, number_text
from paceline.study.rows import target_name

if TYPE_CHECKING:
    import pandas

__all__ = ["medians_table"]

_MEASURES = (
    ("samples/s", "samples_per_s"),
    ("staleness", "staleness_mean"),
    ("waiting", "waiting_share"),
    ("final loss", "train_loss"),
    ("accuracy", "test_accuracy"),
)


def medians_table(table: pandas.DataFrame, *, target: float, title: str) -> Table:
    """One row per combination; a trial that did not reach the target counts as infinitely late in its median."""
    factors = [str(name) for name in table.columns if str(name).startswith("factor.") and name != "factor.seed"]
    varying = [one for one in factors if len(table[one].drop_duplicates()) > 1] or factors[:1]
    name = target_name(target)
    late = [
        (f"{unit} to {name} %", column)
        for unit, column in (("s", f"time_to_{name}_s"), ("steps", f"steps_to_{name}"))
        if _known(table, column)
    ]
    measures = [(head, column) for head, column in _MEASURES if _known(table, column)]
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in (*(one.removeprefix("factor.").removeprefix("algorithm.") for one in varying), "outcomes"):
        shown.add_column(head, overflow="fold")
    for head, _ in (*late, *measures):
        shown.add_column(head, justify="right")
    groups: list[tuple[Any, pandas.DataFrame]] = list(table.groupby(varying, dropna=False, sort=False))
    for key, rows in sorted(groups, key=lambda group: _order(group[0])):
        cells = [_level(level) for level in key]
        cells.append(", ".join(f"{number} {one}" for one, number in rows["outcome"].value_counts().items()))
        cells += [_late(rows[column]) for _, column in late]
        cells += [_median(rows[column]) for _, column in measures]
        shown.add_row(*cells)
    return shown


def _known(table: pandas.DataFrame, column: str) -> bool:
    return column in table and len(table[column].dropna()) > 0


def _order(key: tuple[Any, ...]) -> list[tuple[int, float, str]]:
    """Numbers by size, words by their letters."""
    return [
        (0, level, "") if isinstance(level, int | float) and level == level else (1, 0.0, _level(level))
        for level in key
    ]


def _level(level: Any) -> str:
    return ABSENT if level is None or level != level else f"{level:g}" if isinstance(level, float) else str(level)


def _late(values: Any) -> str:
    """The median of times of which some are later than was waited for."""
    median = values.fillna(float("inf")).median()
    return "not reached" if median == float("inf") else number_text(float(median))


def _median(values: Any) -> str:
    median = values.median()
    return ABSENT if median != median else number_text(float(median))
