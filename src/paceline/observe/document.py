"""The page that reports of one run, of several, of studies and of advice share; its style, script and frame are `report.*`."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import plotly.offline

from paceline.observe.drawing import Figure
from paceline.observe.markup import cell, escape, head, row_name, table
from paceline.observe.palette import METHODS, Theme, tokens
from paceline.records.run_data import write_text

__all__ = ["figure_html", "write_page"]

_MOST_ROWS = 400


def write_page(path: str | Path, *, title: str, answer: str, body: str, figures: Sequence[Figure], kind: str) -> Path:
    """Write one self-contained page, about 5 MB, nearly all of it plotly.js.

    Args:
        path: the HTML file.
        title: heading, as text.
        answer: markup below the heading.
        body: markup of the rest; each figure in it as `figure_html` makes it.
        figures: what is drawn.
        kind: of what it is a report: "run", "study" or "advice", for the style sheet.
    """
    page = Template(_resource("report.html")).substitute(
        title=escape(title),
        style=_resource("report.css") + _swatch_style(),
        kind=kind,
        answer=answer,
        body=body,
        plotly=plotly.offline.get_plotlyjs(),
        figures=_json([_as_json(one) for one in figures]),
        colours=_json({theme: tokens(theme) for theme in METHODS}),
        script=_resource("report.js"),
    )
    write_text(path, page)
    return Path(path)


def figure_html(one: Figure) -> str:
    """The figure's place on the page, with its downloads, and its table for those who cannot see it."""
    name = escape(one.name)
    height = one.height_px + 90
    return (
        f'<figure id="{name}"><figcaption><h3>{escape(one.title)}</h3>{escape(one.note)}</figcaption>'
        f'<div class="plot" id="plot-{name}" style="min-height:{height}px" role="img" '
        f'aria-label="{escape(one.title)}"></div>'
        f'<div class="links" id="links-{name}"><a class="csv" href="#{name}">Data (CSV)</a>'
        f'<a class="png" href="#{name}">Picture (PNG)</a></div>{_same_as_table(one)}</figure>'
    )


def _same_as_table(one: Figure) -> str:
    if not one.table:
        return ""
    heads, *rows = one.table
    shown = table([head(one) for one in heads], [[row_name(row[0]), *map(cell, row[1:])] for row in rows[:_MOST_ROWS]])
    more = f"<p>{len(rows) - _MOST_ROWS} more rows are in the data.</p>" if len(rows) > _MOST_ROWS else ""
    return f'<details class="as-table"><summary>The same as a table</summary>{shown}{more}</details>'


def _as_json(one: Figure) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "table"}


def _resource(name: str) -> str:
    return (importlib.resources.files("paceline.observe") / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON for a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _swatch_style() -> str:
    def rules(theme: Theme) -> str:
        return "".join(f".method-{index} {{ background: {colour}; }}\n" for index, colour in enumerate(METHODS[theme]))

    return rules("light") + "@media (prefers-color-scheme: dark) {\n" + rules("dark") + "}\n"
