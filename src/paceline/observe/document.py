"""Parts of the page that reports of one run, of several and of studies share: escaping, figures, and the file itself."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import plotly.offline

from paceline.observe.page import PAGE, SCRIPT, STYLE
from paceline.observe.palette import METHODS, Theme, tokens
from paceline.observe.panels import Figure
from paceline.records.run_data import write_text

__all__ = ["breakable", "escape", "figure_html", "prose", "swatch", "write_page"]


def write_page(
    path: str | Path, *, title: str, answer: str, body: str, figures: Sequence[Figure], style: str = ""
) -> Path:
    """Write one self-contained page, about 5 MB, nearly all of it plotly.js.

    Args:
        path: the HTML file.
        title: heading, as text.
        answer: markup below the heading.
        body: markup of the rest; each figure in it as `figure_html` makes it.
        figures: what is drawn.
        style: more rules for the style sheet.
    """
    page = Template(PAGE).substitute(
        title=escape(title),
        style=STYLE + _swatch_style() + style,
        answer=answer,
        body=body,
        plotly=plotly.offline.get_plotlyjs(),
        figures=_json([asdict(one) for one in figures]),
        colours=_json({theme: tokens(theme) for theme in METHODS}),
        script=SCRIPT,
    )
    write_text(path, page)
    return Path(path)


def escape(value: Any) -> str:
    """Text as markup."""
    return html.escape(str(value))


def prose(sentence: str) -> str:
    """Escaped, and numbers kept on one line with their units."""
    return re.sub(r"(\d) (?=(?:s|ms|min|h|%)(?!\w))", "\\1&nbsp;", escape(sentence))


def breakable(label: str) -> str:
    """Escaped, and allowed to break where a spec has punctuation."""
    return re.sub(r"([(,=_])", r"\1<wbr>", escape(label))


def swatch(token: str) -> str:
    """A small square in the colour of a method, such as `@method-0`."""
    return f'<span class="swatch {token[1:]}"></span>'


def figure_html(one: Figure, table: str = "") -> str:
    """The figure's place on the page, with its downloads, and markup for those who cannot see it."""
    name = escape(one.name)
    height = one.height_px + 90
    return (
        f'<figure id="{name}"><figcaption><h3>{escape(one.title)}</h3>{escape(one.note)}</figcaption>'
        f'<div class="plot" id="plot-{name}" style="min-height:{height}px" role="img" '
        f'aria-label="{escape(one.title)}"></div>'
        f'<div class="links" id="links-{name}"><a class="csv" href="#{name}">Data (CSV)</a>'
        f'<a class="png" href="#{name}">Picture (PNG)</a></div>{table}</figure>'
    )


def _json(value: Any) -> str:
    """JSON for a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _swatch_style() -> str:
    def rules(theme: Theme) -> str:
        return "".join(f".method-{index} {{ background: {colour}; }}\n" for index, colour in enumerate(METHODS[theme]))

    return rules("light") + "@media (prefers-color-scheme: dark) {\n" + rules("dark") + "}\n"
