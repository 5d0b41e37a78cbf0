"""Types of a dataclass's fields, checked where a user constructs it in Python: a spec's are checked as it is read."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError
from paceline.spec_text import closest

__all__ = ["check_types"]

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}


def check_types(instance: Any) -> None:
    """Refuses values of other types than a dataclass's annotations name.

    Raises:
        UsageError: names the first such field, and what it may be.
    """
    cls = type(instance)
    for name, members in _annotated(cls):
        value = getattr(instance, name)
        if not any(_is_one(member, value) for member in members):
            words = [str(word) for member in members if get_origin(member) is Literal for word in get_args(member)]
            hint = closest(value, words) if isinstance(value, str) else ""
            raise UsageError(
                f"{name} of {cls.__name__} must be {' or '.join(map(_in_words, members))}, not {value!r}.{hint}"
            )


@cache
def _annotated(cls: type) -> list[tuple[str, list[Any]]]:
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        found.append((field.name, list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]))
    return found


def _is_one(member: Any, value: Any) -> bool:
    if get_origin(member) is Literal:
        return isinstance(value, str) and value in get_args(member)
    if member in (int, float):  # NumPy's as well
        return isinstance(value, Integral if member is int else Real) and not isinstance(value, bool)
    return isinstance(value, member)


def _in_words(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(f"'{word}'" for word in get_args(member))
    return _NAMES.get(member, f"of the kind {member.__name__}")
