"""Checks the fields of a dataclass against their annotations when it is constructed.

`period: Annotated[int, COUNT]` must be an integer within that bound (`bounds.py`).
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError, shown
from paceline.specs.bounds import Bound
from paceline.specs.text import closest

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}


def check_fields(instance: Any) -> None:
    """Refuses a dataclass's first value that is not of its annotated type, or is a number outside its bounds."""
    cls = type(instance)
    for name, allowed in allowed_types(cls).items():
        value = getattr(instance, name)
        found = [bound for member, bound in allowed if _is_one(member, value)]
        where = f"{name} of {cls.__name__}"
        if not found:
            words = [str(word) for member, _ in allowed if get_origin(member) is Literal for word in get_args(member)]
            hint = closest(value, words) if isinstance(value, str) else ""
            kinds = " or ".join(_in_words(member) for member, _ in allowed)
            raise UsageError(f"{where} must be {kinds}, not {shown(value)}.{hint}")
        if found[0] is not None:
            found[0].check(where, value)


@cache
def allowed_types(cls: type) -> dict[str, list[tuple[Any, Bound | None]]]:
    """By field of a dataclass: its allowed types, and the bound of each."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _members(hints[field.name]) for field in dataclasses.fields(cls)}


def _members(hint: Any) -> list[tuple[Any, Bound | None]]:
    found = []
    for part in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        kind, *more = get_args(part) if get_origin(part) is Annotated else (part,)
        found.append((kind, next((one for one in more if isinstance(one, Bound)), None)))
    return found


def _is_one(member: Any, value: Any) -> bool:
    if get_origin(member) is Literal:
        return isinstance(value, str) and value in get_args(member)
    if member in (int, float):  # NumPy's as well
        return isinstance(value, Integral if member is int else Real) and not isinstance(value, bool)
    return member is Any or isinstance(value, get_origin(member) or member)


def _in_words(member: Any) -> str:
    if get_origin(member) is Literal:
        return " or ".join(f"'{word}'" for word in get_args(member))
    return _NAMES.get(member, f"of the kind {(get_origin(member) or member).__name__}")
