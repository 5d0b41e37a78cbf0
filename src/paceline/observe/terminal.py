"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import table
from rich.box import SIMPLE_HEAD
from rich.text import Text

from paceline.observe.document import Cell, Table

OUTCOMES = {"converged": "green", "stopped": "yellow", "diverged": "bold red", "crashed": "bold red"}
_STYLES = {"best": "bold green", "found": "bold"}


def terminal_table(page: Table, title: str | None = None, notes: Sequence[str] = ()) -> table.Table:
    """A page's table for the terminal, readable from 80 columns on: columns of names wrap, and no cell is cut."""
    made = table.Table(
        header_style="bold", caption_justify="left", caption_style="dim", box=SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0), show_edge=False, title_justify="left", title=title,
        caption=Text("\n".join(notes)) if notes else None,
    )  # fmt: skip
    for head in page.heads[-1]:
        is_name = "name" in head.kind
        made.add_column(
            Text("\n".join(filter(None, (head.text, head.below)))), justify="left" if is_name else "right",
            no_wrap=not is_name, overflow="fold", min_width=12 if head is page.heads[-1][0] and is_name else None,
        )  # fmt: skip
    for row in page.rows:
        made.add_row(*(Text(cell.text, _style(cell)) for cell in row))
    return made


def _style(cell: Cell) -> str:
    styles, name = (OUTCOMES, cell.text) if cell.kind.startswith("outcome") else (_STYLES, cell.kind.split(" ")[-1])
    return styles.get(name, "")
