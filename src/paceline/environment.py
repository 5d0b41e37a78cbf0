"""Who a worker is: set by the launcher that started it, read by `attach`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["WorkerEnvironment", "current_environment", "set_environment"]


@dataclass
class WorkerEnvironment:
    """One worker of a launched run.

    Args:
        worker_id: 0 to num_workers - 1, kept over restarts.
        num_workers: as the run was started.
        incarnation: 0 for the worker's first process, one more after each restart.
        taken: batches that its earlier processes in this run have trained on.
        algorithm: the launcher's canonical spec, or None where the user's code names the algorithm.
        seed: the run's.
        connection: to the supervisor.
        checkpoint: folder to save checkpoints in, or None.
        resume: a complete checkpoint to start from, or None.
        placement: spec of where the parameters' memory lies and whether workers are pinned.
        optimizer_state: "per-worker" or "shared".
        attached: whether `attach` has joined the run; a second time would find no batches left.
    """

    worker_id: int
    num_workers: int
    incarnation: int
    algorithm: str | None
    seed: int
    connection: Any
    checkpoint: Path | None = None
    resume: Path | None = None
    placement: str = "first-touch"
    optimizer_state: str = "per-worker"
    taken: int = 0
    attached: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[WorkerEnvironment | None] = ContextVar("paceline_environment", default=None)


def current_environment() -> WorkerEnvironment | None:
    """The worker that this code runs as; None outside any launcher."""
    return _current.get()


def set_environment(environment: WorkerEnvironment | None) -> None:
    """Makes this thread (or process) the given worker."""
    _current.set(environment)
