"""A supervisor's state: its workers, and the outcome of their run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, name_workers, printable, shown
from paceline.membership.environment import SupervisedEnvironment, current_environment
from paceline.memory.arena import Arena
from paceline.memory.placement import placement_registry
from paceline.specs.bounds import check_run, check_workers
from paceline.transport.device import gpu_of
from paceline.worker.by_value import pickled_function
from paceline.worker.process import Failure, process_main, run_worker

NO_WORKER_0 = (
    "Worker 0 ended without calling paceline.attach, and all workers need its model: call attach on every worker."
)


@dataclass
class WorkerState:
    """The supervisor's state of one worker."""

    worker_id: int
    incarnation: int = 0
    connection: Any = None
    handle: Any = None  # Process or Thread
    ready: bool = False
    ended: bool = False
    lost: bool = False
    failure: Failure | None = None
    waits: bool = False  # it is a dead worker's replacement that the others have not let in yet

    @property
    def running(self) -> bool:
        """Whether the worker may still be active."""
        return not self.ended and not self.lost

    @property
    def takes_part(self) -> bool:
        """Whether the worker may still be active, and the others wait for it where all meet."""
        return self.running and not self.waits

    @property
    def exit_code(self) -> int | None:
        """Exit code of its process; None for a thread."""
        return getattr(self.handle, "exitcode", None)

    def join(self, deadline_s: float, *, is_process: bool) -> None:
        """Waits for its end until that time of the monotonic clock; a process that has not ended by then is killed."""
        if self.handle is None:
            return
        if (self.handle.pid if is_process else self.handle.ident) is None:
            self.connection.close()  # Ctrl-C came before it had begun
            return
        self.handle.join(max(0.0, deadline_s - time.monotonic()))
        if is_process and self.handle.is_alive():
            self.handle.kill()
            self.handle.join()
        if not self.ended:
            self.lost = True
        self.connection.close()


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
    view_changes: list[dict[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[int | None, str] = field(default_factory=dict)  # checkpoints that failed, and why; None: the last
    snapshots_failed: int = 0

    def interrupt(self, by: str) -> None:
        """Notes that Ctrl-C or SIGTERM has ended the run."""
        if self.name == "stopped":
            self.reason = f"Interrupted by {by}."

    def name_hung(self, workers: list[int]) -> None:
        """Names the workers that have not ended since the run failed; a missed worker that has not died is one of them."""
        if workers and self.kind == "worker-lost" and not self.workers_lost:
            who = name_workers(workers)
            self.reason = f"{who[0].upper()}{who[1:]} stalled. {self.reason}"

    def leave_out(self, number: int | None, why: str) -> None:
        """Notes that a checkpoint cannot be written and is left out; says so once."""
        if not self.left_out:
            self.notes.append(f"A checkpoint is left out, and the one before it stays: {why}")
        self.left_out.setdefault(number, why)

    def count_failed_snapshot(self, why: str) -> None:
        """Notes that a server cannot write its snapshot; says so only once, because the server tries again."""
        if not self.snapshots_failed:
            self.notes.append(f"A server's snapshot failed, so that more is lost should it die before the next: {why}")
        self.snapshots_failed += 1


def survivors(workers: Iterable[WorkerState]) -> list[int]:
    """Workers that ended by themselves, or because they missed another one."""
    return [
        one.worker_id
        for one in workers
        if one.ended and not one.waits and (one.failure is None or one.failure.kind == "worker-lost")
    ]


def hung(workers: Iterable[WorkerState], arena: Arena | None) -> list[int]:
    """Workers that still train, and not those that have ended and wait for them."""
    running = [one.worker_id for one in workers if one.running]
    return [one for one in running if arena is None or not arena.has_ended(one)]


def is_replica_lost(workers: Iterable[WorkerState], mates: range) -> bool:
    """Whether a replica, of which these workers have the parts, has lost one of them while other replicas can continue."""
    own, others = set[bool](), set[bool]()
    for one in workers:
        (own if one.worker_id in mates else others).add(not one.lost and one.failure is None)
    return False in own and True in others


def ended_in_order(workers: Iterable[WorkerState], outcome: Outcome) -> bool:
    """Whether all workers ended normally, except for those whose death was noticed and repaired."""
    return all((one.ended and one.failure is None) or one.worker_id in outcome.workers_lost for one in workers)


def check_launch(*, num_workers: int, backend: str, placement: str, num_servers: int = 0) -> None:
    """Refuses a launch that cannot work; call it before anything is written.

    Raises:
        UsageError: fewer workers than one or more than fit, an unknown backend or memory node, a call inside a worker, or a
            process that cannot start others.
    """
    check_run({"workers": num_workers})
    if backend not in ("processes", "threads"):
        raise UsageError(f"Unknown backend {shown(backend)}: choose processes or threads.")
    check_workers(num_workers, backend=backend, num_servers=num_servers if num_workers > 1 else 0)
    placement_registry.build(placement).check()
    refuse_inside_worker()
    if backend == "processes":
        _check_processes()


def _check_processes() -> None:
    """Refuses worker processes if none can be started, or none could import the program."""
    this, method = multiprocessing.current_process(), multiprocessing.get_start_method(allow_none=True)
    if this.daemon or method not in (None, *multiprocessing.get_all_start_methods()):
        raise UsageError(
            "A process of multiprocessing.Pool or joblib cannot start workers as processes: use backend='threads', or"
            " concurrent.futures.ProcessPoolExecutor instead of the pool."
        )
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and main.__spec__ is None and not Path(file).exists():
        raise UsageError(
            f"Worker processes cannot import the program, because there is no file {printable(file)}: save it in a file, "
            "or use backend='threads'."
        )


def refuse_inside_worker() -> None:
    """Refuses to launch or simulate inside a worker, with a `UsageError`."""
    if current_environment() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "launch was called inside a worker, most likely while it imported your script: put the call under"
            " `if __name__ == '__main__':`."
        )


def pickled(target: Callable[[], Any]) -> bytes:
    """The function to train as bytes, tensors by value.

    Otherwise multiprocessing's own pickler would put each of its tensors into PyTorch's shared memory, and keep a thread and a
    socket in this process to hand them out.
    """
    try:
        return pickled_function(target)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"The function to train cannot be sent to a worker process ({error}); define it at the top level of a"
            " module, or use backend='threads'."
        ) from error


def start_thread(
    worker: WorkerState,
    target: Callable[[], Any],
    environment: SupervisedEnvironment,
    handles: tuple[int, ...],
    connection: Any,
) -> None:
    """Starts a worker as a thread of this process; `connection` is its end of the connection to the supervisor."""
    handles = tuple(map(os.dup, handles))
    worker.handle = threading.Thread(
        target=run_worker,
        args=(target, replace(environment, connection=connection, own_process=False, handles=handles)),
        name=f"paceline-worker-{worker.worker_id}",
        daemon=True,
    )
    worker.handle.start()


def start_process(
    worker: WorkerState,
    context: Any,
    pickled_target: bytes,
    environment: SupervisedEnvironment,
    handles: tuple[int, ...],
    connection: Any,
) -> None:
    """Starts a worker as a process, then sends it its function and the file descriptors that it may use."""
    worker.handle = context.Process(
        target=process_main,
        args=(connection,),
        name=f"paceline-worker-{worker.worker_id}",
        daemon=True,
        variables=gpu_of(worker.worker_id),
    )
    worker.handle.start()
    connection.close()
    with contextlib.suppress(OSError):  # it died at once: its end is the next news
        start_method = multiprocessing.get_start_method(allow_none=True)
        worker.connection.send((pickled_target, environment, len(handles), start_method))
        for handle in handles:
            reduction.send_handle(worker.connection, handle, worker.handle.pid)
