"""The common parts of all reports: tables as data, and pages from templates that escape all text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.observe.drawing import Figure
from paceline.observe.palette import METHODS, tokens
from paceline.observe.words import counted, few, number_text, percent_text, seconds_text
from paceline.system.files import write_text

if TYPE_CHECKING:
    import jinja2

_MOST_ROWS = 400  # of a figure's table


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table."""

    text: str
    below: str = ""  # small text below it, such as a unit or an interval
    kind: str = ""
    colour: str | None = None  # of a small square in front of it, such as `@method-0`
    columns: int = 1
    rows: int = 1


class Table:
    """A table, which scrolls sideways if it is too wide; the first cell of a row names it."""

    def __init__(self, rows: Iterable[Sequence[Cell | str]], *heads: Sequence[Cell | str], kind: str = "") -> None:
        self.rows, self.heads = ([[_cell(one) for one in line] for line in lines] for lines in (rows, heads))
        self.kind = kind


def _cell(one: Cell | str | float | None) -> Cell:
    return one if isinstance(one, Cell) else Cell(one if isinstance(one, str) else number_text(one))


def settings_table(rows: Iterable[tuple[str, Sequence[Any]]], heads: Sequence[str] = ()) -> Table:
    """A table of names and values; a value that all columns share is one cell."""

    def cells(texts: list[str]) -> list[Cell]:
        alike = len(set(texts)) == 1
        return [Cell(texts[0], columns=len(texts))] if alike else [Cell(text) for text in texts]

    lines = [[Cell(name), *cells([json_value(one) for one in values])] for name, values in rows]
    return Table(lines, *([[Cell(one, kind="name") for one in heads]] if heads else []), kind="settings")


def json_value(value: Any) -> str:
    """A setting: text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def write_page(path: str | Path, template: str, *, title: str, figures: Sequence[Figure], **parts: Any) -> Path:
    """Write one self-contained page, about 5 MB, nearly all of it plotly.js.

    Args:
        path: the HTML file.
        template: extends `observe/page.html`.
        title: heading.
        figures: the figures; the template places each by `m.figure`.
        parts: further variables of the template.
    """
    import plotly.offline  # imported at the end of a run, like Jinja2, to start faster
    from markupsafe import Markup

    colours = {theme: tokens(theme) for theme in METHODS}
    plotly_js = Markup(plotly.offline.get_plotlyjs())
    write_text(Path(path), markup(template, title=title, figures=figures, colours=colours, plotly=plotly_js, **parts))
    return Path(path)


def markup(template: str, **parts: Any) -> str:
    """Renders a template of the package."""
    return _environment().get_template(template).render(**parts)


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup, escape

    loader = jinja2.PackageLoader("paceline", "")
    found = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    found.filters |= {
        # Numbers stay on one line with their units.
        "prose": lambda text: Markup(re.sub(r"(\d) (?=(?:s|ms|min|h|%)(?!\w))", r"\1&nbsp;", str(escape(text)))),
        # A spec may break at its punctuation.
        "breakable": lambda text: Markup(re.sub(r"([(,=_])", r"\1<wbr>", str(escape(text)))),
        "number": number_text,
        "percent": percent_text,
        "counted": counted,
        "few": few,
        "seconds": seconds_text,
        "as_table": lambda rows, most: Table(rows[1 : most + 1], rows[0]),
        # Not `dataclasses.asdict`, which copies every number.
        "drawn": lambda figure: {one.name: getattr(figure, one.name) for one in fields(figure)},
    }
    found.globals |= {
        "source": lambda name: Markup(loader.get_source(found, name)[0]),
        "most_rows": _MOST_ROWS,
    }
    return found
