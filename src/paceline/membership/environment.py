"""The identity of a worker: set by the launcher that started it, ours or another, and read by `attach`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.errors import UsageError, shown
from paceline.records import checkpoint_files
from paceline.specs.bounds import COUNT, COUNT_FROM_0, DEADLINE_S, Bound
from paceline.specs.goal import Goal
from paceline.system.uncaught import say_alone
from paceline.transport.keys import Keys

# A worker's number, how many there are, and its number on its machine: torchrun (Ray Train, TorchDistributor), Slurm, MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """One worker of a run, as its launcher describes it; the subclass for each kind of launcher adds to it."""

    worker_id: int = 0  # 0 to num_workers - 1, kept over restarts
    num_workers: int = 1  # as the run was started
    incarnation: int = 0  # 0 for the worker's first process, one more after each restart
    algorithm: str | None = None  # the launcher's canonical spec, or None if the user's code names the algorithm
    seed: int = 0
    min_workers: int = 1  # if fewer than this many workers are left, they wait for replacements
    #: Whether each worker's loaders have samples of their own, so that their batches are not shared out.
    own_data: bool = False

    @property
    def local_rank(self) -> int:
        """The worker's number on its machine, if the launcher sets that; else `worker_id`."""
        told = (local for rank, _, local in _LAUNCHERS if os.environ.get(rank) == str(self.worker_id))
        return next((_number(local) for local in told if local in os.environ), self.worker_id)


@dataclass(frozen=True, kw_only=True)
class SupervisedEnvironment(WorkerEnvironment):
    """A worker, or a server, that a supervisor of ours started and watches."""

    connection: Connection | None = None  # to the supervisor; None as long as this is on its way to the worker
    #: Whether the worker has a process to itself, whose signals, allocator and affinity it may set.
    own_process: bool = True
    handles: tuple[int, ...] = ()  # file descriptors that the worker may use
    taken: int = 0  # batches that its earlier processes in this run have trained on
    checkpoint: Path | None = None  # folder to save checkpoints in, or None
    resume: Path | None = None  # a complete checkpoint to start from, or None
    placement: str = "first-touch"  # spec of where the parameters' memory lies
    pin: bool = False  # whether processes are pinned to cores
    intra_op_threads: int = 1  # threads inside one PyTorch operation
    goal: Goal | None = None  # what a loop's evaluations are for; None: it does not evaluate
    #: By worker, how many times as long its gradients take.
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    batches_done: Collection[int] = ()  # batches that a resumed run leaves out
    done_before: tuple[int, int] = (0, 0)  # steps and samples of a resumed run's earlier part
    plan: object = None  # of a placed model, the same for all workers
    #: Iterators that workers in threads share, by epoch.
    streams: dict[int, object] = field(default_factory=dict[int, object])
    step_deadline_s: float = 60.0  # how long its workers wait for each other in a step

    @property
    def supervisor(self) -> Connection:
        assert self.connection is not None
        return self.connection


@dataclass(frozen=True, kw_only=True)
class LaunchedEnvironment(WorkerEnvironment):
    """A worker that torchrun or another launcher started, which has no supervisor."""

    deadline_s: float = 600.0  # how long it waits for the others
    checkpoint: Path | None = None  # folder to save checkpoints in, or None
    resume: Path | None = None  # a complete checkpoint to start from, or None
    out: Path | None = None  # folder for this worker's records and model; None: nothing is written


@dataclass(frozen=True, kw_only=True)
class Invitation(WorkerEnvironment):
    """Where a worker joins a run; its number is not known before."""

    address: str  # HOST:PORT of the join point
    #: Key file that all workers of the run share, or its contents; needed if other machines can reach the address.
    key: Path | Keys | None = None
    of: int | None = None  # how many workers the run has; None: as the first to come decides
    out: Path | None = None  # folder for this worker's records and model; None: nothing is written
    deadline_s: float = 600.0  # how long it waits for the others


@dataclass
class _Running:
    """The worker that this thread (or process) runs as, and its state so far."""

    environment: WorkerEnvironment
    has_attached: bool = False
    at_end: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])


_current: ContextVar[_Running | None] = ContextVar("paceline_environment", default=None)


def current_environment() -> WorkerEnvironment | None:
    """The worker that this code runs as; None outside any launcher, and for another launcher's only worker.

    If a launcher has started this process, an uncaught Paceline error prints one line from now on.
    """
    running = _current.get()
    return running.environment if running is not None else _invited() or _of_another_launcher()


def set_environment(environment: WorkerEnvironment | None) -> list[Callable[[], object]]:
    """Makes this thread (or process) the given worker; returns the list that `call_at_end` appends to from now on."""
    running = _Running(environment) if environment is not None else None
    _current.set(running)
    return running.at_end if running is not None else []


def call_at_end(call: Callable[[], object]) -> None:
    """Calls `call` once the worker that this thread runs as has reported how it ended."""
    if (running := _current.get()) is not None:
        running.at_end.append(call)


def attach_once() -> None:
    """Marks the worker that this thread runs as attached; a second time would find no batches left.

    Raises:
        UsageError: it has attached before.
    """
    running = _current.get()
    if running is not None and running.has_attached:
        raise UsageError(
            "A launched function can attach only once, because its workers share one model and one count of batches: "
            "call launch again for another training."
        )
    if running is not None:
        running.has_attached = True


def named_algorithm() -> str | None:
    """The spec in PACELINE_ALGORITHM, for launchers that have no other way to pass it on."""
    return os.environ.get("PACELINE_ALGORITHM") or None


def _invited() -> Invitation | None:
    """Reads PACELINE_JOIN, which `paceline launch` or the user sets.

    Raises:
        UsageError: `accelerate launch` has also started this process as one of several, and would make its own run of them.
    """
    address = os.environ.get("PACELINE_JOIN")
    if not address:
        return None
    say_alone()
    if "ACCELERATE_MIXED_PRECISION" in os.environ and _number("WORLD_SIZE", COUNT, "1") > 1:
        raise UsageError(
            "Both paceline launch and accelerate launch started this worker, and each would make its own run: leave "
            "accelerate launch out, as in `paceline launch -- SCRIPT.py`."
        )
    key, out = os.environ.get("PACELINE_KEY"), os.environ.get("PACELINE_OUT")
    of = _number("PACELINE_OF", COUNT) if os.environ.get("PACELINE_OF") else None
    return Invitation(
        num_workers=of or 1,
        address=address,
        key=Path(key) if key else None,
        of=of,
        min_workers=_number("PACELINE_MIN_WORKERS", COUNT, "1"),
        out=Path(out) if out else None,
        deadline_s=_number("PACELINE_DEADLINE_S", DEADLINE_S, "600"),
    )


def _of_another_launcher() -> LaunchedEnvironment | None:
    """Reads the variables that launchers set; they count only together with MASTER_ADDR and MASTER_PORT."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        # Slurm's variables do not count: they are also set in a batch script, which runs once.
        started = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
        if started != "1" and os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
            warnings.warn(
                f"mpirun has started {started} processes, and each trains alone. To make them workers of one run, set"
                " MASTER_ADDR and MASTER_PORT, as in `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500`.",
                stacklevel=2,
            )
        return None
    for rank, size, _ in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            say_alone()
            worker_id, num_workers = _number(rank), _number(size)
            named = os.environ.get("PACELINE_CHECKPOINT")
            if num_workers == 1 and not named:
                return None
            if not 0 <= worker_id < num_workers:
                raise UsageError(
                    f"{rank}={worker_id} does not exist: with {size}={num_workers}, workers are numbered from 0 to "
                    f"{num_workers - 1}."
                )
            folder = Path(named).absolute() if named else None
            return LaunchedEnvironment(
                worker_id=worker_id,
                num_workers=num_workers,
                deadline_s=_number("PACELINE_DEADLINE_S", DEADLINE_S, "600"),
                checkpoint=folder,
                resume=checkpoint_files.newest_or_none(folder) if folder is not None else None,
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
