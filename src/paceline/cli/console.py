"""Where words go: results to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

__all__ = ["complain", "err", "out", "say"]


def out() -> Console:
    """Standard output; made when asked for, so that it follows redirection."""
    return Console(highlight=False)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def complain(message: str) -> None:
    """One sentence about what is wrong, on stderr, unbroken so that it can be copied."""
    err().print(f"[bold red]paceline:[/] {escape(message)}", soft_wrap=True, emoji=False)


def say(message: str) -> None:
    """One line for people, on stderr, unbroken so that paths in it can be clicked."""
    err().print(escape(message), soft_wrap=True, emoji=False)  # :train: is a train
