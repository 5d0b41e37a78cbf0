"""Who a worker is: set by the launcher that started it, ours or another, and read by `attach`."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint import contents as checkpoint
from paceline.errors import UsageError, shown
from paceline.specs.bounds import COUNT, COUNT_FROM_0, DEADLINE_S, Bound

__all__ = ["Invitation", "WorkerEnvironment", "current_environment", "named_algorithm", "set_environment"]

# A worker's number and how many there are: torchrun (and Ray Train, TorchDistributor), Slurm, Open MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Invitation:
    """Where a worker joins a run.

    Args:
        address: HOST:PORT of the join point.
        key: file that all workers of the run share; needed where other machines can reach the address.
        of: how many workers the run has; None: as the first to come says.
        out: folder for this worker's records and model; None: nothing is written.
    """

    address: str
    key: Path | None = None
    of: int | None = None
    out: Path | None = None


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
        connection: to the supervisor; None: another launcher started the workers, and they have none.
        checkpoint: folder to save checkpoints in, or None.
        resume: a complete checkpoint to start from, or None.
        placement: spec of where the parameters' memory lies and whether workers are pinned.
        optimizer_state: "per-worker" or "shared".
        simulation: what joins the worker to a simulated run; None: it is real.
        deadline_s: how long a worker without a supervisor waits for the others.
        invitation: to a run that this worker has not joined yet; its number is not known before.
        joined: what it holds of the run that it joined.
        attached: whether `attach` has joined the run; a second time would find no batches left.
        evaluating: the process or thread that this worker started to evaluate the run; it is joined at the end.
        random_states: digests of its generators' states as it attached; empty where these are nobody else's business.
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
    simulation: Any = None
    deadline_s: float = 600.0
    invitation: Invitation | None = None
    joined: Any = None
    attached: bool = False
    evaluating: Any = None
    random_states: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def supervised(self) -> bool:
        """Whether a supervisor of ours started this worker and watches it."""
        return self.connection is not None


_current: ContextVar[WorkerEnvironment | None] = ContextVar("paceline_environment", default=None)


def current_environment() -> WorkerEnvironment | None:
    """The worker that this code runs as; None outside any launcher, and for another launcher's only worker."""
    return _current.get() or _invited() or _of_another_launcher()


def named_algorithm() -> str | None:
    """The spec in PACELINE_ALGORITHM: for launchers that have no other way to pass it on."""
    return os.environ.get("PACELINE_ALGORITHM") or None


def _invited() -> WorkerEnvironment | None:
    """Read from PACELINE_JOIN, which `paceline launch` or the user sets."""
    address = os.environ.get("PACELINE_JOIN")
    if not address:
        return None
    key, out = os.environ.get("PACELINE_KEY"), os.environ.get("PACELINE_OUT")
    of = _number("PACELINE_OF", COUNT) if os.environ.get("PACELINE_OF") else None
    return WorkerEnvironment(
        worker_id=0,
        num_workers=of or 1,
        incarnation=0,
        algorithm=None,
        seed=0,
        connection=None,
        invitation=Invitation(address, Path(key) if key else None, of, Path(out) if out else None),
        deadline_s=_number("PACELINE_DEADLINE_S", DEADLINE_S, "600"),
    )


def _of_another_launcher() -> WorkerEnvironment | None:
    """Read from the variables that launchers set; they count where MASTER_ADDR and MASTER_PORT say how workers meet."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return None
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            worker_id, num_workers = _number(rank), _number(size)
            if num_workers == 1:
                return None
            if not 0 <= worker_id < num_workers:
                raise UsageError(f"{rank}={worker_id} does not exist among {size}={num_workers} workers, from 0.")
            named = os.environ.get("PACELINE_CHECKPOINT")
            folder = Path(named).absolute() if named else None
            return WorkerEnvironment(
                worker_id=worker_id,
                num_workers=num_workers,
                incarnation=0,
                algorithm=None,
                seed=0,
                connection=None,
                deadline_s=_number("PACELINE_DEADLINE_S", DEADLINE_S, "600"),
                checkpoint=folder,
                resume=checkpoint.newest_or_none(folder) if folder is not None else None,
            )
    return None


def _number(variable: str, bound: Bound = COUNT_FROM_0, default: str = "") -> int:
    text = os.environ.get(variable, default)
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{variable} must be a whole number, not {shown(text)}.") from None
    bound.check(variable, number)
    return number


def set_environment(environment: WorkerEnvironment | None) -> None:
    """Makes this thread (or process) the given worker."""
    _current.set(environment)
