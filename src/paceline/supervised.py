"""What a supervisor keeps of its workers and of how their run went."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.environment import current_environment
from paceline.errors import UsageError
from paceline.placement import placement_registry
from paceline.worker_process import Failure

__all__ = ["Outcome", "WorkerState", "check_launch", "pickled"]


@dataclass
class WorkerState:
    """What the supervisor knows of one worker."""

    worker_id: int
    incarnation: int = 0
    connection: Any = None
    handle: Any = None  # Process or Thread
    ready: bool = False
    ended: bool = False
    lost: bool = False
    failure: Failure | None = None

    @property
    def running(self) -> bool:
        """Whether the worker may still do something."""
        return not self.ended and not self.lost


@dataclass
class Outcome:
    """How a run ended, before its records are summed up."""

    name: str = "stopped"  # converged | stopped | diverged | crashed
    reason: str = ""
    trace: str = ""
    kind: str = ""
    workers_lost: list[int] = field(default_factory=list)
    torn_updates: int = 0
    restarts: int = 0
    notes: list[str] = field(default_factory=list)


def check_launch(*, num_workers: int, backend: str, placement: str) -> None:
    """Refuses what cannot be launched; call it before anything is written.

    Raises:
        UsageError: no workers, an unknown backend or memory node, or a call inside a worker.
    """
    if num_workers < 1:
        raise UsageError(f"A run needs at least 1 worker, not {num_workers}.")
    if backend not in ("processes", "threads"):
        raise UsageError(f"Unknown backend {backend!r}: choose processes or threads.")
    placement_registry.build(placement).check()
    if current_environment() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "launch was called inside a worker, most likely while it imported your script: put the call under"
            " `if __name__ == '__main__':`."
        )


def pickled(target: Callable[[], Any]) -> bytes:
    """The function to train as bytes, tensors by value.

    Sent as it is, multiprocessing's own pickler would put each tensor in it into shared memory of PyTorch's and keep a thread
    and a socket in this process to hand it out, for good.
    """
    try:
        return pickle.dumps(target)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"The function to train cannot be sent to a worker process ({error}); define it at the top level of a"
            " module, or use backend='threads'."
        ) from error
