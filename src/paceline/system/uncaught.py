"""Uncaught errors: prints only the message of an error that says what to do, and ends the process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError

#: Environment variable of one agent's workers: a folder in which the first worker to print an error notes it.
SAID = "PACELINE_SAID"


def say_alone() -> None:
    """Prints an uncaught Paceline error in one line from now on, without a traceback, as on the command line.

    Workers of one agent that end with the same error print it once.
    """
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        if not _was_said(str(error)):
            say(str(error))
        raise SystemExit(2 if isinstance(error, UsageError) else 1)

    sys.excepthook = hook


def say(sentence: str) -> None:
    """Prints a sentence to standard error, as from Paceline."""
    # Not sys.stderr: torch.distributed's hook replaces it, and prints its contents only if this returns.
    if sys.__stderr__ is not None:  # print would take None for standard output
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            print(f"paceline: {sentence}", file=sys.__stderr__, flush=True)


def _was_said(sentence: str) -> bool:
    if folder := os.environ.get(SAID):
        try:
            Path(folder, hashlib.blake2b(sentence.encode(), digest_size=16).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return True
        except OSError:  # the agent has ended
            pass
    return False
