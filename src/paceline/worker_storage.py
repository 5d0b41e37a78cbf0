"""What a worker's program keeps of its own from one step to the next, in the worker's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import checkpoint

__all__ = ["WorkerStorage"]


class WorkerStorage:
    """Implements `Storage` for a worker: nothing is written but when the session saves a checkpoint.

    Args:
        resume: the checkpoint that the run goes on from, or None.
        worker_id: whose part of it.
    """

    def __init__(self, resume: Path | None, worker_id: int) -> None:
        self._resume = resume
        self._worker_id = worker_id
        self._state: Callable[[], dict[str, Any]] | None = None

    def restore(self) -> dict[str, Any] | None:
        """What the program kept in the checkpoint."""
        return checkpoint.load_program(self._resume, self._worker_id) if self._resume is not None else None

    def keep(self, state: Callable[[], dict[str, Any]], version: int) -> None:
        """From now on, checkpoints hold what `state` returns."""
        self._state = state

    def checkpoint(self, state: Callable[[], dict[str, Any]], number: int | None) -> None:
        """A worker's checkpoints are its session's to write."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint of now holds."""
        return self._state() if self._state is not None else None
