"""A worker's part of checkpoints: what its program keeps of its own in it, and what happens where it cannot be written."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import contents as checkpoint
from paceline.errors import NotWrittenError
from paceline.membership.environment import WorkerEnvironment
from paceline.worker.process import NotSaved

__all__ = ["WorkerStorage", "completed", "save_or_tell"]

_END_PAUSES_S = (0.0, 0.3, 1.0)  # before each try to write the last checkpoint


def save_or_tell(environment: WorkerEnvironment, number: int | None, save: Callable[[], object]) -> None:
    """Calls what writes a part of a checkpoint; where that fails, training goes on, and the supervisor or the user is told.

    Args:
        environment: of the worker.
        number: of the checkpoint; None: the last one, which is tried again, as there will be no other.
        save: raises `NotWrittenError`.
    """
    failure = ""
    for pause_s in (0.0,) if number is not None else _END_PAUSES_S:
        time.sleep(pause_s)
        try:
            save()
            return
        except NotWrittenError as error:
            failure = str(error)
    if environment.supervised:
        environment.connection.send(NotSaved(failure, number))
    else:
        warnings.warn(f"A checkpoint is left out: {failure}", stacklevel=3)


def completed(environment: WorkerEnvironment | None, number: int, num_workers: int) -> bool:
    """Marks a checkpoint as complete once all workers' parts are there, where no supervisor does; whether it is behind us."""
    if environment is None or environment.checkpoint is None:
        return True
    folder, workers = environment.checkpoint, list(range(num_workers))
    if not checkpoint.all_there(folder, number, workers):
        return False
    save_or_tell(environment, number, lambda: checkpoint.complete(folder, number, workers, {}))
    return True


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
        self._updates_before = 0  # of its own model, up to the checkpoint

    def restore(self) -> dict[str, Any] | None:
        """What the program kept in the checkpoint."""
        return checkpoint.load_program(self._resume, self._worker_id) if self._resume is not None else None

    def keep(self, state: Callable[[], dict[str, Any]], version: int) -> None:
        """From now on, checkpoints hold what `state` returns."""
        self._state = state

    def checkpoint(self, state: Callable[[], dict[str, Any]], number: int | None) -> None:
        """A worker's checkpoints are its session's to write."""

    def save(
        self, folder: Path, number: int | None, optimizer: torch.optim.Optimizer, taken: int, own_model: Any
    ) -> None:
        """Writes the worker's part of a checkpoint; `own_model`: its vector, where every worker has one; else None."""
        model = None
        if own_model is not None:
            version, updates, x = own_model.own()
            model = version, self._updates_before + updates, x
        program = self._state() if self._state is not None else None
        checkpoint.save_worker(folder, number, self._worker_id, optimizer, taken, model, program)

    def restore_model(self, own_model: Any) -> None:
        """Gives the worker's vector what the checkpoint has of it, if every worker had one."""
        found = checkpoint.load_model(self._resume, self._worker_id) if self._resume is not None else None
        if found is not None:
            version, self._updates_before, x = found
            own_model.restore(version, x)
