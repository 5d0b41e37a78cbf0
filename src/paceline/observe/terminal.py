"""Tables of figures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["BEST", "figures_table"]

BEST = "bold green"


def figures_table(name: str | None, figures: Sequence[str], *, words: Sequence[str] = ()) -> Table:
    """A table that never cuts its cells, readable from 80 columns on.

    Args:
        name: heading of the column that names the rows; only this column wraps. None: there is no such column.
        figures: headings of the columns of numbers.
        words: headings of columns before them.
    """
    table = Table(
        header_style="bold", caption_justify="left", caption_style="dim", box=SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    if name is not None:
        table.add_column(name, overflow="fold", min_width=12)
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
