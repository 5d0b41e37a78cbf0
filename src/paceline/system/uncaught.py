"""Errors that nobody catches: those that say what to do end the process with just that."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from paceline.errors import PacelineError, UsageError

__all__ = ["say_alone"]


def say_alone() -> None:
    """From now on an uncaught error of Paceline's is printed in one line, without a traceback, as on the command line."""
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def say(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        # Not sys.stderr: torch.distributed's hook replaces it, and prints what it holds only if this returns.
        if sys.__stderr__ is not None:  # print would take None, a closed stream, for standard output
            with contextlib.suppress(OSError):  # a full disk must not change the exit code
                print(f"paceline: {error}", file=sys.__stderr__, flush=True)
        raise SystemExit(2 if isinstance(error, UsageError) else 1)

    sys.excepthook = say
