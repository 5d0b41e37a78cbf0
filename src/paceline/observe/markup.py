"""Text as the markup of a page: escaped, in tables, in lists; nothing that a user has named becomes markup."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "breakable", "cell", "escape", "head", "json_value", "listed", "paragraphs", "preformatted", "prose", "row_name",
    "settings_table", "swatch", "table",
]  # fmt: skip


def escape(value: Any) -> str:
    """Text as markup."""
    return html.escape(str(value))


def prose(sentence: str) -> str:
    """Escaped, and numbers kept on one line with their units."""
    return re.sub(r"(\d) (?=(?:s|ms|min|h|%)(?!\w))", "\\1&nbsp;", escape(sentence))


def breakable(label: str) -> str:
    """Escaped, and allowed to break where a spec has punctuation."""
    return re.sub(r"([(,=_])", r"\1<wbr>", escape(label))


def swatch(token: str | None) -> str:
    """A small square in the colour of a method, such as `@method-0`; nothing for no colour."""
    return f'<span class="swatch {token[1:]}"></span>' if token else ""


def paragraphs(kind: str, sentences: Iterable[str]) -> str:
    """A paragraph of a kind for each sentence."""
    return "\n".join(f'<p class="{kind}">{prose(one)}</p>' for one in sentences)


def listed(sentences: Iterable[str]) -> str:
    """A list with a point for each sentence."""
    return f'<ul class="said">{"".join(f"<li>{prose(one)}</li>" for one in sentences)}</ul>'


def preformatted(text: str) -> str:
    """A command or a file as it is; nothing of an empty one."""
    return f"<pre>{escape(text)}</pre>\n" if text else ""


def head(text: str, unit: str = "", *, named: bool = False, more: str = "") -> str:
    """The heading of a column: its name, its unit below, whether names stand in it, and further attributes."""
    return f"<th{_kind('name' if named else '')}{more}>{escape(text).replace(chr(10), '<br>')}{_small(unit)}</th>"


def cell(text: str, below: str = "", *, kind: str = "") -> str:
    """A cell: its text, what stands below in small letters, and its kind in the style sheet."""
    return f"<td{_kind(kind)}>{escape(text)}{_small(below)}</td>"


def row_name(label: str, colour: str | None = None, below: str = "", *, kind: str = "") -> str:
    """The first cell of a row, which names it."""
    return f'<th{_kind(f"name {kind}")} scope="row">{swatch(colour)}{breakable(label)}{_small(below)}</th>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """A table, which scrolls sideways where it is too wide.

    Args:
        heads: cells as `head` makes them, or whole lines of them with `</tr><tr>` between.
        rows: cells as `row_name` and `cell` make them.
        kind: in the style sheet.
    """
    above = f"<thead><tr>{''.join(heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table{_kind(kind)}>{above}<tbody>{body}</tbody></table></div>'


def settings_table(rows: Iterable[tuple[str, Sequence[Any]]], heads: Sequence[str] = ()) -> str:
    """Names and values; values that are the same in all columns are said once."""
    return table(
        [head(one, named=True) for one in heads],
        [[f'<th scope="row">{escape(name)}</th>', *_values([json_value(one) for one in values])] for name, values in rows],
        kind="settings",
    )  # fmt: skip


def json_value(value: Any) -> str:
    """A setting: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _values(texts: list[str]) -> list[str]:
    if len(texts) > 1 and len(set(texts)) == 1:
        return [f'<td colspan="{len(texts)}">{escape(texts[0])}</td>']
    return [cell(text) for text in texts]


def _kind(kind: str) -> str:
    return f' class="{kind.strip()}"' if kind.strip() else ""


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""
