"""Programs to give advice on, by name."""

from __future__ import annotations

from pathlib import Path

from paceline.advice.loops import LoopProgram
from paceline.advice.program import Program
from paceline.advice.tasks import TaskProgram
from paceline.errors import UsageError
from paceline.specs.file_loop import load_loop
from paceline.tasks.load import BUILT_IN

__all__ = ["load_program"]


def load_program(reference: str, data: Path | None = None) -> Program:
    """A built-in task by name, or a user's loop from `FILE.py:FUNCTION`.

    Raises:
        UsageError: there is no such thing; a file's message names the line.
    """
    if reference in BUILT_IN:
        return TaskProgram(name=reference, data=data)
    if data is not None:
        raise UsageError("A folder with data is for a built-in task; a loop of your own loads its data itself.")
    load_loop(reference)
    return LoopProgram(name=reference)
