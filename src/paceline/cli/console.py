"""Output: results on stdout, everything else on stderr; untrusted text cannot control the terminal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from paceline.errors import printable

_LONGEST_COMPLAINT = 2000


class _PlainConsole(Console):
    """A console for untrusted text from files, models and users: it is not markup and cannot control the terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, **named: Any) -> None:
        """Does not wrap lines of text unless told to, so that paths and commands can be copied and clicked."""
        super().print(*objects, **{"soft_wrap": all(isinstance(one, str | Text) for one in objects), **named})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text, keep="\n"), style)


def out() -> Console:
    """Standard output; created on each call, so that it follows redirection."""
    return _PlainConsole()


def err() -> Console:
    """Standard error."""
    return _PlainConsole(stderr=True)


def results(*, as_json: bool) -> Console:
    """A verb's results for people: on stdout, or on stderr if stdout's last line is the result as JSON."""
    return err() if as_json else out()


def print_json(value: Any, *, allow_nan: bool = True) -> None:
    """Prints a result as one line of JSON on stdout; without `allow_nan` it must not contain NaN or infinity."""
    print(json.dumps(value, allow_nan=allow_nan), flush=True)


def verbs(help: str, **named: Any) -> typer.Typer:
    """A group of verbs."""
    return typer.Typer(help=help, context_settings={"help_option_names": ["-h", "--help"]}, **named)


def complain(message: str) -> None:
    """Prints an error on stderr; shortens a very long one in the middle."""
    if len(message) > _LONGEST_COMPLAINT:
        half = _LONGEST_COMPLAINT // 2
        message = f"{message[:half]} ... {message[-half:]}"
    err().print(Text.assemble(("paceline:", "bold red"), f" {message}"))


def say(message: str) -> None:
    """Prints one line on stderr."""
    err().print(message)


@contextlib.contextmanager
def stages() -> Iterator[Callable[..., None]]:
    """Yields a function that reports the current activity and the share done: a status line on a terminal, else lines."""
    console, last = err(), ""
    redraws = console.is_terminal and not console.is_dumb_terminal
    with console.status("") as status:

        def tell(what: str, share: float | None = None) -> None:
            nonlocal last
            line = what if share is None else f"{100 * share:3.0f} %  {what}"
            if redraws:
                status.update(Text(line))
            elif what != last:
                say(line)
            last = what

        yield tell


def page_about(page: str) -> str:
    """The last line of a verb's help: the documentation page about it."""
    return f"More: docs/{page}.md, a page of the site that `make docs` builds."
