"""The text of specs: `name(argument=value, other=nested(x=1))`, parsed by hand and never evaluated.

spec     := name [ "(" [ argument { "," argument } ] ")" ]
argument := identifier "=" value
value    := whole number | number | true | false | none | word | spec
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Union

from paceline.errors import UsageError

Value = Union[int, float, bool, None, str, "Spec"]

_TOKEN = re.compile(r"[A-Za-z0-9_.+-]+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf")
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
_MAX_DEPTH = 16
_MOST_DIGITS = 1000


@dataclass(frozen=True)
class Spec:
    """A parsed spec: a name and its arguments, not yet checked against any registry."""

    name: str
    arguments: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """The spec as text; `parse_spec(str(spec)) == spec`."""
        if not self.arguments:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value_text(value)}' for key, value in self.arguments.items())})"


def parse_spec(text: str) -> Spec:
    """Parse one spec.

    >>> parse_spec("leashed(persistence=2, backoff=exponential(base=1e-6))")
    Spec(name='leashed', arguments={'persistence': 2, 'backoff': Spec(name='exponential', arguments={'base': 1e-06})})

    Raises:
        UsageError: the text is not a spec; the message shows the position.
    """
    parser = _Parser(text)
    spec = parser.spec(depth=0)
    parser.end()
    return spec


def split_specs(text: str) -> list[str]:
    """Split a list of specs at the commas outside parentheses.

    >>> split_specs("hogwild, leashed(persistence=2, backoff=linear)")
    ['hogwild', 'leashed(persistence=2, backoff=linear)']

    Raises:
        UsageError: parentheses are unbalanced or an entry is empty.
    """
    parts, start, opened = [], 0, []
    for position, character in enumerate(text):
        if character == "(":
            opened.append(position)
        elif character == ")":
            if not opened:
                raise _syntax_error(text, position, "this ')' closes nothing; remove it or add its '('")
            opened.pop()
        elif character == "," and not opened:
            parts.append(text[start:position].strip())
            start = position + 1
    if opened:
        raise _syntax_error(text, opened[-1], "this '(' is never closed; add a ')'")
    parts.append(text[start:].strip())
    if not all(parts):
        raise UsageError(f"'{text}' has an empty entry between commas; remove the extra comma.")
    return parts


def closest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name nearest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name.lower().replace("_", "-"), list(known), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def value_text(value: Value) -> str:
    """A value as it appears in a spec."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Spec):
        return str(value) if value.arguments else f"{value.name}()"
    return value if isinstance(value, str) else repr(value)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def spec(self, depth: int) -> Spec:
        name, start = self.token("a name")
        if not NAME.fullmatch(name):
            raise _syntax_error(self.text, start, f"'{name}' is not a name")
        return Spec(name, self.arguments(depth) if self.peek() == "(" else {})

    def arguments(self, depth: int) -> dict[str, Value]:
        opened = self.position
        if depth >= _MAX_DEPTH:
            raise _syntax_error(self.text, opened, f"parentheses are nested more than {_MAX_DEPTH} deep")
        self.position += 1
        arguments: dict[str, Value] = {}
        if self.peek() == ")":
            self.position += 1
            return arguments
        while True:
            if not self.peek():
                raise _syntax_error(self.text, opened, "this '(' is never closed; add a ')'")
            key, start = self.token("an argument, as in name(argument=value)")
            if not key.isidentifier():
                raise _syntax_error(self.text, start, f"'{key}' is no argument's name")
            if self.peek() != "=":
                raise _syntax_error(self.text, start, f"'{key}' has no value; write {key}=value")
            if key in arguments:
                raise _syntax_error(self.text, start, f"'{key}' is given twice; keep one")
            self.position += 1
            arguments[key] = self.value(depth)
            separator = self.peek()
            if separator not in (",", ")"):
                what = "this '(' is never closed; add a ')'" if not separator else "expected ',' or ')'"
                raise _syntax_error(self.text, opened if not separator else self.position, what)
            self.position += 1
            if separator == ")":
                return arguments

    def value(self, depth: int) -> Value:
        token, start = self.token("a value")
        if self.peek() == "(":
            if not NAME.fullmatch(token):
                raise _syntax_error(self.text, start, f"'{token}' is not a name")
            return Spec(token, self.arguments(depth + 1))
        if _INT.fullmatch(token):
            if len(token) > _MOST_DIGITS:
                raise _syntax_error(self.text, start, f"a whole number has at most {_MOST_DIGITS} digits")
            return int(token)
        if _FLOAT.fullmatch(token):
            return float(token)
        if token.lower() in _CONSTANTS:
            return _CONSTANTS[token.lower()]
        if not NAME.fullmatch(token):
            raise _syntax_error(self.text, start, f"'{token}' is neither a number nor a word")
        return token

    def token(self, expected: str) -> tuple[str, int]:
        self.peek()
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise _syntax_error(self.text, self.position, f"expected {expected}")
        self.position = match.end()
        return match.group(), match.start()

    def peek(self) -> str:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1
        return self.text[self.position : self.position + 1]

    def end(self) -> None:
        if self.peek() == ")":
            raise _syntax_error(self.text, self.position, "this ')' closes nothing; remove it or add its '('")
        if self.peek():
            raise _syntax_error(self.text, self.position, "expected the end of the spec")


def _syntax_error(text: str, position: int, what: str) -> UsageError:
    return UsageError(f"Cannot read the spec '{text}' at position {position + 1}: {what}.")
