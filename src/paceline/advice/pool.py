"""A pool of processes for simulations, with deadlines for starting and for ending jobs."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerProcess
from typing import Any, Self

from paceline.data.ending_processes import end_with_parent
from paceline.errors import PacelineError
from paceline.run.fork_server import fork_server_context
from paceline.system.interrupts import leave_to_supervisor


class Pool:
    """A `ProcessPoolExecutor` whose processes end with their parent and can be killed during a job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._executor: ProcessPoolExecutor | None = None
        self._processes: list[ForkServerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end(at_once=error is not None)

    def map(
        self,
        call: Callable[[Any], Any],  # a function at the top level of a module
        jobs: Sequence[Any],  # its arguments, one for each call
        *,
        begin_until_s: float,  # on `time.monotonic`'s clock: no job begins later
        end_until_s: float,  # jobs that still run then are abandoned, and their processes killed
        on_done: Callable[[int], None] = lambda _: None,  # called with the number of finished jobs
    ) -> list[Any]:
        """The results of `call` for each job, in the jobs' order; None for jobs that ran out of time.

        Raises:
            PacelineError: a job raised an exception, or its process ended.
        """
        if not self.size:
            found = []
            for job in jobs:
                found.append(call(job) if time.monotonic() < begin_until_s else None)
                on_done(len(found))
            return found
        if time.monotonic() >= begin_until_s:
            return [None] * len(jobs)
        executor = self._started()
        futures = [executor.submit(_work, call, job, begin_until_s) for job in jobs]
        try:
            for done, future in enumerate(as_completed(futures, max(0.0, end_until_s - time.monotonic())), 1):
                future.result()
                on_done(done)
        except TimeoutError:
            results = [future.result() if future.done() else None for future in futures]
            self._end(at_once=True)
            return results
        except BrokenProcessPool:
            self._end(at_once=True)
            raise PacelineError(
                "A simulation process has ended; the machine may be short of memory: try fewer workers."
            ) from None
        return [future.result() for future in futures]

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context: Any = fork_server_context()
            begin = context.Process

            def process(*args: Any, **named: Any) -> ForkServerProcess:
                self._processes.append(begin(*args, **named))
                return self._processes[-1]

            context.Process = process
            self._executor = ProcessPoolExecutor(self.size, context, _begin)
        return self._executor

    def _end(self, *, at_once: bool) -> None:
        if self._executor is None:
            return
        for process in self._processes if at_once else ():
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        self._executor = None
        self._processes.clear()


_for_life = contextlib.ExitStack()  # of a process of the pool


def _begin() -> None:
    import torch

    from paceline.tasks.base import keep_data

    leave_to_supervisor()
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _for_life.enter_context(keep_data())
    _for_life.enter_context(contextlib.redirect_stdout(io.StringIO()))  # a loop may print; stdout is for the answer


def _work(call: Callable[[Any], Any], job: Any, begin_until_s: float) -> Any:
    if time.monotonic() >= begin_until_s:
        return None
    try:
        return call(job)
    except (Exception, SystemExit) as error:  # it may not be picklable: send its text
        raise PacelineError(f"{type(error).__name__} in a simulation: {error}") from None
