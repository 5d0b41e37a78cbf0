"""Where words go: results to stdout, everything else to stderr; what is not ours is printed so that it controls nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from paceline.errors import printable

__all__ = ["complain", "err", "out", "page_about", "print_json", "results", "say", "verbs"]

_LONGEST_COMPLAINT = 2000


class _PlainConsole(Console):
    """A console for names and texts of files, models and users: nothing in them is markup, or controls the terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text, keep="\n"), style)


def out() -> Console:
    """Standard output; made when asked for, so that it follows redirection."""
    return _PlainConsole()


def err() -> Console:
    """Standard error."""
    return _PlainConsole(stderr=True)


def results(*, as_json: bool) -> Console:
    """Where a verb's results are told to people: beside them, on stderr, where stdout's last line is the result as JSON."""
    return err() if as_json else out()


def print_json(value: Any, *, allow_nan: bool = True) -> None:
    """A result as JSON, in one line of stdout; without `allow_nan` it must not hold numbers that JSON does not know."""
    print(json.dumps(value, allow_nan=allow_nan), flush=True)


def verbs(help: str, **named: Any) -> typer.Typer:
    """A group of verbs."""
    return typer.Typer(help=help, context_settings={"help_option_names": ["-h", "--help"]}, **named)


def complain(message: str) -> None:
    """What is wrong, on stderr, unbroken so that it can be copied; of very long ones, both ends."""
    if len(message) > _LONGEST_COMPLAINT:
        half = _LONGEST_COMPLAINT // 2
        message = f"{message[:half]} ... {message[-half:]}"
    err().print(Text.assemble(("paceline:", "bold red"), f" {message}"), soft_wrap=True)


def say(message: str) -> None:
    """One line for people, on stderr, unbroken so that paths in it can be clicked."""
    err().print(message, soft_wrap=True)


def page_about(page: str) -> str:
    """The last line of a verb's help: which page of the documentation is about it."""
    return f"More: docs/{page}.md, a page of the site that `make docs` builds."
