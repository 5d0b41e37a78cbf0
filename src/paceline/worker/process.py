"""A worker's life from start to end: what runs inside the process (or thread) that `launch` starts."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.errors import (
    DivergedError,
    NotReplacedError,
    PacelineError,
    RunStopped,
    UsageError,
    WorkerLostError,
    exits_in_order,
)
from paceline.membership.environment import SupervisedEnvironment, set_environment
from paceline.memory import failpoints
from paceline.memory import numa as placement
from paceline.memory.arena import Arena, ArenaPlan
from paceline.memory.segment import Segment
from paceline.memory.waiting import have_core_each, raise_if_stopped, wait_briefly
from paceline.optim.sharding import Sharding
from paceline.system.interrupts import leave_to_supervisor
from paceline.system.tagged_output import tagged_output

_KINDS = {
    DivergedError: "diverged",
    WorkerLostError: "worker-lost",
    UsageError: "usage",
}


@dataclass(frozen=True)
class Hello:
    """A worker describes what it wants to train, which must be the same for all.

    `untrained` has the name, the bytes and the digest of each frozen parameter and of each buffer that is not a dense tensor.
    """

    algorithm: str
    num_elements: int
    num_parameters: int
    dtype: torch.dtype
    memory_order: str  # of the parameters
    shapes: tuple[tuple[int | str, ...], ...]
    extra: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sharding: Sharding | None = None
    untrained: tuple[tuple[str, int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Welcome:
    """The supervisor's answer: the memory's plan (its descriptor follows), or why it refuses the worker."""

    plan: ArenaPlan | None
    initialise: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Ready:
    """The worker has mapped the memory (and initialised it, if asked)."""


@dataclass(frozen=True)
class Failure:
    """The worker's program ended with an error."""

    kind: str  # "diverged" | "worker-lost" | "not let in" | "not replaced" | "usage" | "error"
    message: str
    trace: str = ""


@dataclass(frozen=True)
class NotSaved:
    """A part of a checkpoint or a server's snapshot cannot be written; the worker or server continues."""

    why: str  # a sentence
    number: int | None = None  # of the checkpoint; None: the last one
    is_snapshot: bool = False  # of a server's own


@dataclass(frozen=True)
class Done:
    """The worker ended normally."""


def join_run(
    environment: SupervisedEnvironment,  # this worker
    hello: Hello,  # what it wants to train
    # Writes the initial parameters into a flat vector, and other tensors into the arena; called in worker 0.
    initial: Callable[[Arena, torch.Tensor], None],
    tell: Callable[[Arena], None],  # writes what the workers tell each other at the start; called in every worker
) -> Arena:
    """Meets the supervisor: says what to train, maps the memory, waits until everyone is ready.

    Raises:
        UsageError: the workers disagree, or the supervisor cannot run this.
    """
    connection = environment.supervisor
    connection.send(hello)
    welcome: Welcome = connection.recv()
    if welcome.plan is None:
        raise UsageError(welcome.refusal)
    segment = Segment.from_fd(reduction.recv_handle(connection), welcome.plan.size_bytes)
    arena = Arena(segment, welcome.plan, environment.worker_id, environment.incarnation)
    if welcome.initialise:
        x = torch.empty(hello.num_elements, dtype=hello.dtype)
        initial(arena, x)
        arena.shared.initialise(x, arena.load("initial_version"))
    tell(arena)
    connection.send(Ready())
    while not wait_briefly(arena.address("go"), 0):
        raise_if_stopped(arena.address("abort"))
    return arena


def run_worker(target: Callable[[], Any], environment: SupervisedEnvironment) -> None:
    """Runs `target`, the user's function or a task's loop, as the given worker and reports how it ended."""
    with environment.supervisor as connection:
        at_end = set_environment(environment)
        message: Done | Failure = Done()
        try:
            if environment.own_process:
                _prepare_process(environment)
            with _tagged(environment):
                target()  # its return value stays here: a model's memory would go with this process
        except BaseException as error:  # the user's code may raise anything, also by `sys.exit`
            message = _ending(error)
        finally:
            set_environment(None)
        with contextlib.suppress(OSError):  # the supervisor is gone
            connection.send(message)
        for call in at_end:
            call()


def _ending(error: BaseException) -> Done | Failure:
    """The report to the supervisor about a function that raised this, with a traceback unless the error is Paceline's own."""
    if isinstance(error, RunStopped) or exits_in_order(error):
        return Done()
    if isinstance(error, NotReplacedError):
        return Failure("not let in" if error.can_try_again else "not replaced", error.why)
    if isinstance(error, PacelineError):
        return Failure(next((kind for one, kind in _KINDS.items() if isinstance(error, one)), "error"), str(error))
    return Failure("error", f"{type(error).__name__}: {error}", traceback.format_exc())


def _tagged(environment: SupervisedEnvironment) -> contextlib.AbstractContextManager[None]:
    """Tags the worker's output with its id, if there are several workers."""
    is_one_of_several = environment.own_process and 1 < environment.num_workers > environment.worker_id
    return tagged_output(f"[{environment.worker_id}] ") if is_one_of_several else contextlib.nullcontext()


def _prepare_process(environment: SupervisedEnvironment) -> None:
    _keep_freed_memory(one_arena=environment.worker_id >= environment.num_workers)
    _end_with_supervisor(environment.supervisor)
    torch.set_num_threads(environment.intra_op_threads)
    if environment.pin:
        placement.pin(environment.worker_id, environment.num_workers, sorted(os.sched_getaffinity(0)))
    have_core_each(environment.num_workers)
    if environment.worker_id:  # worker 0's loader says it for all
        for of_loaders in ("This DataLoader will create", "'pin_memory' argument is set as true but"):
            warnings.filterwarnings("ignore", of_loaders, UserWarning)
    failpoints.arm(environment.worker_id, environment.incarnation)


def _end_with_supervisor(connection: Connection) -> None:
    """Ends this process at once when the supervisor dies in any way; no process of a run outlives it.

    The fork server does not help: it lives as long as its workers do. The kernel closes the supervisor's end of the
    connection; a thread waits for only that, and reads no messages.
    """

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(descriptor, 0)  # the end of the other side is always reported
        hang_up.poll()
        os._exit(1)

    descriptor = os.dup(connection.fileno())  # stays open until this process ends
    threading.Thread(target=watch, name="paceline-supervisor-watch", daemon=True).start()


def _keep_freed_memory(*, one_arena: bool) -> None:
    """Tells malloc to keep freed memory: the next step allocates its activations again.

    By default glibc returns large blocks to the kernel, which then clears every page again; that cost 3 to 7 % of a step of
    mnist-mlp.

    Args:
        one_arena: all threads share freed memory. ZeroMQ's thread allocates a server's gradients and the server's own thread
            its answers, and each would keep its peak. Call this before the process starts a second thread.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 1 << 30)
        if one_arena:
            mallopt(m_arena_max, 1)


def process_main(connection: Connection) -> None:
    """Entry point of a worker's process: the supervisor sends what to run."""
    leave_to_supervisor()
    pickled, environment, num_handles, start_method = connection.recv()
    # Processes that the loop starts, such as a DataLoader's, start as in a program of their own: not from a fork server, which
    # could not take unnamed functions and would load PyTorch for each. And a daemon may not have children.
    multiprocessing.set_start_method(start_method, force=True)
    multiprocessing.current_process().daemon = False
    handles = tuple(reduction.recv_handle(connection) for _ in range(num_handles))
    run_worker(lambda: _unpickled(pickled)(), replace(environment, connection=connection, handles=handles))


def _unpickled(target: bytes) -> Callable[[], Any]:
    try:
        return pickle.loads(target)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"A worker process cannot import the function to train ({error}); define it in a file that can be imported, or"
            " use backend='threads'."
        ) from error
