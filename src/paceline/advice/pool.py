"""A pool of processes for simulations, with deadlines for starting and for ending jobs."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Self

from paceline.errors import PacelineError
from paceline.run.fork_server import fork_server_context
from paceline.system.interrupts import leave_to_supervisor

__all__ = ["Pool"]

_JOIN_S = 5.0


class Pool:
    """Processes that wait for jobs; those of `ProcessPoolExecutor` outlive a killed parent, and cannot end one job."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[tuple[Connection, ForkServerProcess]] = []
        self._all: list[tuple[Connection, ForkServerProcess]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for line, _ in self._all:
            line.close()  # the end of a process's line is its own
        for _, process in self._all:
            process.join(_JOIN_S if error is None else 0.0)
            _end(process)
        self._all.clear()
        self._idle.clear()

    def map(
        self,
        call: Callable[[Any], Any],
        jobs: Sequence[Any],
        *,
        begin_until_s: float,
        end_until_s: float,
        on_done: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """What `call` returns for each job, in the jobs' order; None for those that there was no time for.

        Args:
            call: a function at the top level of a module.
            jobs: what it is called with.
            begin_until_s: on `time.monotonic`'s clock: no job begins later.
            end_until_s: jobs that still run then are given up, and their processes ended.
            on_done: told how many jobs are done.

        Raises:
            PacelineError: a job raised something, or its process ended.
        """
        if not self._size:
            found = []
            for job in jobs:
                found.append(call(job) if time.monotonic() < begin_until_s else None)
                on_done(len(found))
            return found
        results: list[Any] = [None] * len(jobs)
        waiting, running, done = list(range(len(jobs))), {}, 0
        while waiting or running:
            while waiting and len(running) < self._size and time.monotonic() < begin_until_s:
                line, process = self._idle.pop() if self._idle else self._started()
                number = waiting.pop(0)
                with contextlib.suppress(BrokenPipeError):  # its process has ended, which is heard below
                    line.send((call, jobs[number]))
                running[line] = (number, process)
            if time.monotonic() >= begin_until_s:
                waiting.clear()
            if not running:
                break
            for line in wait(list(running), timeout=max(0.0, min(1.0, end_until_s - time.monotonic()))):
                number, process = running.pop(line)  # type: ignore[arg-type]
                results[number] = self._received(line, process)  # type: ignore[arg-type]
                done += 1
                on_done(done)
            if time.monotonic() >= end_until_s:
                for line, (_, process) in running.items():
                    self._drop(line, process)
                break
        return results

    def _started(self) -> tuple[Connection, ForkServerProcess]:
        context = fork_server_context()
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._all.append((ours, process))
        return ours, process

    def _received(self, line: Connection, process: ForkServerProcess) -> Any:
        try:
            error, result = line.recv()
        except (EOFError, ConnectionResetError):
            self._drop(line, process)
            raise PacelineError(
                "A process that simulates has ended; the machine may be short of memory: try fewer workers."
            ) from None
        self._idle.append((line, process))
        if error is not None:
            raise error
        return result

    def _drop(self, line: Connection, process: ForkServerProcess) -> None:
        self._all.remove((line, process))
        line.close()
        _end(process)


def _end(process: ForkServerProcess) -> None:
    if process.exitcode is None:
        process.kill()
        process.join()
    process.close()


def _work(line: Connection) -> None:
    leave_to_supervisor()
    import torch

    from paceline.tasks.base import keep_data

    torch.set_num_threads(1)
    unheard = contextlib.redirect_stdout(io.StringIO())  # a loop may print; a program's own output is no place for that
    with keep_data(), unheard, contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            call, job = line.recv()
            try:
                answer = (None, call(job))
            except (Exception, SystemExit) as error:  # only its words can be sent for sure
                answer = (PacelineError(f"{type(error).__name__} in a simulation: {error}"), None)
            line.send(answer)
