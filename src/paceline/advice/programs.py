"""Programs to give advice on, by name."""

from __future__ import annotations

from pathlib import Path

from paceline.advice.program import Program
from paceline.advice.tasks import TaskProgram
from paceline.errors import UsageError
from paceline.tasks.load import BUILT_IN

__all__ = ["load_program"]


def load_program(reference: str, data: Path | None = None) -> Program:
    """A built-in task by name.

    Raises:
        UsageError: there is no such thing.
    """
    if reference in BUILT_IN:
        return TaskProgram(name=reference, data=data)
    raise UsageError(f"'{reference}' is no built-in task; known: {', '.join(BUILT_IN)}.")
