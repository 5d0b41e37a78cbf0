"""Plain data as the text of a TOML file; Python reads TOML, but does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def as_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Numbers, texts, lists and tables, in their order, with tables last, as TOML requires.

    >>> print(as_toml({"a": {"b.c": [1, 2.5]}, "d": "e"}), end="")
    d = "e"
    <BLANKLINE>
    [a]
    "b.c" = [1, 2.5]
    """
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in plain.items()]
    for key, value in table.items():
        if _is_table(value):
            name = f"{path}.{_key(key)}" if path else _key(key)
            text = as_toml(value, name)
            lines.append(f"\n[{name}]\n{text}")
    return "".join(lines)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and "from" not in value  # a range is written on one line


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON's escapes are TOML's, but for this one


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return _text(value)
        case Mapping():
            return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
