"""Reads what other workers send: plain JSON as values of a type, and a ValueError for what no worker of this version sends."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["read"]

_MOST = 1e15  # above any time, speed or count


def read(kind: Any, words: Any) -> Any:
    """The value of type `kind`: a dataclass, a named tuple, or what these and JSON are made of.

    Raises:
        ValueError: it is none.
    """
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if kind is Any:
        return words
    if origin is UnionType:  # with None
        return None if words is None else read(arguments[0], words)
    if origin in (int, float):
        if type(words) not in (origin, int) or not abs(words) < _MOST:
            raise ValueError(f"{words!r} where a number is expected")
        return origin(words)
    if dataclasses.is_dataclass(origin):
        hints = get_type_hints(origin)
        if _of(dict, words).keys() != hints.keys():
            raise ValueError(f"{sorted(words)} of {origin}")
        return kind(**{name: read(hints[name], value) for name, value in words.items()})
    if origin is dict:
        key_of = _whole if arguments[0] is int else str
        return {key_of(key): read(arguments[1], value) for key, value in _of(dict, words).items()}
    if origin is list:
        return [read(arguments[0], one) for one in _of(list, words)]
    if issubclass(origin, tuple):
        hints = get_type_hints(origin)
        return origin(*(read(one, word) for one, word in zip(hints.values(), _of(list, words), strict=True)))
    return _of(origin, words)


def _whole(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 16):
        raise ValueError(f"{key!r} where a whole number is expected")
    return int(key)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} is expected")
    return value
