"""Where words go: results to stdout, everything else to stderr; what is not ours is printed so that it controls nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from paceline.errors import printable

__all__ = ["complain", "err", "out", "say"]

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


def complain(message: str) -> None:
    """What is wrong, on stderr, unbroken so that it can be copied; of very long ones, both ends."""
    if len(message) > _LONGEST_COMPLAINT:
        half = _LONGEST_COMPLAINT // 2
        message = f"{message[:half]} ... {message[-half:]}"
    err().print(Text.assemble(("paceline:", "bold red"), f" {message}"), soft_wrap=True)


def say(message: str) -> None:
    """One line for people, on stderr, unbroken so that paths in it can be clicked."""
    err().print(message, soft_wrap=True)
