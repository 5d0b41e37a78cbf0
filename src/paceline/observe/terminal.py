"""Tables of figures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import table
from rich.box import SIMPLE_HEAD
from rich.text import Text

from paceline.observe.document import Cell, Table

BEST = "bold green"
OUTCOMES = {"converged": "green", "stopped": "yellow", "diverged": "bold red", "crashed": "bold red"}
_STYLES = {"best": BEST, "found": "bold"}


def figures_table(name: str | None, figures: Sequence[str]) -> table.Table:
    """A table that never cuts its cells, readable from 80 columns on.

    Args:
        name: heading of the column that names the rows, which wraps. None: there is no such column.
        figures: headings of the columns of numbers.
    """
    made = table.Table(
        header_style="bold", caption_justify="left", caption_style="dim", box=SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
    )  # fmt: skip
    if name is not None:
        made.add_column(name, overflow="fold", min_width=12)
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def shown(page: Table, title: str | None = None) -> table.Table:
    """A page's table for the terminal; columns of names wrap."""
    first, *others = page.heads[-1]
    made = figures_table(first.text, ())
    made.title = title
    for head in others:
        is_name = "name" in head.kind
        text = "\n".join(filter(None, (head.text, head.below)))
        made.add_column(text, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in page.rows:
        made.add_row(*(Text(cell.text, _style(cell)) for cell in row))
    return made


def _style(cell: Cell) -> str:
    if cell.kind.startswith("outcome"):
        return OUTCOMES.get(cell.text, "")
    return _STYLES.get(cell.kind.removeprefix("name "), "")
