"""A worker's life, from its first breath to its goodbye: what runs inside the process (or thread) that `launch` starts."""

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

from paceline.errors import DivergedError, PacelineError, RunStopped, UsageError, WorkerLostError, exits_in_order
from paceline.membership.environment import SupervisedEnvironment, set_environment
from paceline.memory import failpoints
from paceline.memory import numa as placement
from paceline.memory.arena import Arena, ArenaPlan
from paceline.memory.segment import Segment
from paceline.memory.waiting import have_core_each, raise_if_stopped, wait_briefly
from paceline.system.interrupts import leave_to_supervisor
from paceline.system.tagged_output import tagged_output
from paceline.vectors.sharding import Sharding

__all__ = ["Done", "Failure", "Hello", "NotSaved", "Ready", "Welcome", "join_run", "run_worker"]

_KINDS = {DivergedError: "diverged", WorkerLostError: "worker-lost", UsageError: "usage"}


@dataclass(frozen=True)
class Hello:
    """A worker names what it wants to train; all must want the same.

    `untrained` has the name, the bytes and the digest of each frozen parameter and of each buffer that is no dense tensor.
    """

    algorithm: str
    num_elements: int
    num_parameters: int
    dtype: torch.dtype
    shapes: tuple[tuple[int | str, ...], ...]
    extra: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sharding: Sharding | None = None
    untrained: tuple[tuple[str, int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Welcome:
    """The supervisor's answer: the memory's plan (its descriptor follows), or why not."""

    plan: ArenaPlan | None
    initialise: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Ready:
    """The worker has mapped the memory (and initialised it, if it was asked to)."""


@dataclass(frozen=True)
class Failure:
    """The worker's program ended with an error."""

    kind: str  # "diverged" | "worker-lost" | "usage" | "error"
    message: str
    trace: str = ""


@dataclass(frozen=True)
class NotSaved:
    """A part of a checkpoint cannot be written (the worker, or server, goes on), or a server's snapshot.

    Args:
        why: a sentence.
        number: of the checkpoint; None: the last one.
        is_snapshot: of a server's own.
    """

    why: str
    number: int | None = None
    is_snapshot: bool = False


@dataclass(frozen=True)
class Done:
    """The worker ended normally."""


def join_run(
    environment: SupervisedEnvironment,
    hello: Hello,
    initial: Callable[[Arena, torch.Tensor], None],
    tell: Callable[[Arena], None],
) -> Arena:
    """Meets the supervisor: says what to train, maps the memory, waits until everyone is ready.

    Args:
        environment: this worker.
        hello: what it wants to train.
        initial: writes the initial parameters into a flat vector, and the model's other tensors into the arena; called in
            worker 0.
        tell: writes what all shall know of each other when they begin; called in every worker.

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
                target()  # what it returns stays here: a model's memory would go with this process
        except BaseException as error:  # whatever the user's code raises, `sys.exit` too
            message = _ending(error)
        finally:
            set_environment(None)
        with contextlib.suppress(OSError):  # the supervisor is gone: there is nobody left to tell
            connection.send(message)
        for call in at_end:
            call()


def _ending(error: BaseException) -> Done | Failure:
    """What the supervisor is told of a function that has raised this: with a traceback, unless the error is Paceline's own."""
    if isinstance(error, RunStopped) or exits_in_order(error):
        return Done()
    if isinstance(error, PacelineError):
        return Failure(next((kind for one, kind in _KINDS.items() if isinstance(error, one)), "error"), str(error))
    return Failure("error", f"{type(error).__name__}: {error}", traceback.format_exc())


def _tagged(environment: SupervisedEnvironment) -> contextlib.AbstractContextManager[None]:
    """What one of several workers prints says whose it is."""
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
    """Ends this process at once when the supervisor has died, however it died; nothing of a run outlives it.

    The fork server is no help: it lives as long as its workers do. What tells is the connection, whose other end the kernel
    closes; a thread waits for that and for nothing else, so that messages stay for those who expect them.
    """

    def watch() -> None:
        hang_up = select.poll()
        hang_up.register(descriptor, 0)  # the end of the other side is always reported
        hang_up.poll()
        os._exit(1)

    descriptor = os.dup(connection.fileno())  # stays open until this process ends
    threading.Thread(target=watch, name="paceline-supervisor-watch", daemon=True).start()


def _keep_freed_memory(*, one_arena: bool) -> None:
    """Tells malloc to keep what is freed: activations are allocated again in the next step.

    By default glibc returns large blocks to the kernel, which then clears every page anew; that cost 3 to 7 % of a step of
    mnist-mlp.

    Args:
        one_arena: all threads share what is freed. A server's gradients are allocated by ZeroMQ's thread and its answers by
            its own, and each would keep the most that it ever had. Must come before the process's second thread.
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
    # What the loop starts, such as a DataLoader's processes, starts as in a program of its own: not by a fork server, which
    # could not take functions without a name, and would load PyTorch for each; and a daemon may not have children.
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
