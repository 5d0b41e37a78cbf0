"""Errors that a user can act on: one sentence says what is wrong, and what to do about it."""

from __future__ import annotations

__all__ = ["PacelineError", "UsageError", "WorkerLostError"]


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """The input is wrong: the message names it and the remedy. The CLI prints the message and exits with code 2."""


class WorkerLostError(PacelineError, RuntimeError):
    """An algorithm that cannot go on without a worker lost one; the message names the workers present and missing."""
