"""Background programs of one worker, as threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.ports.ports import Event, Mailbox


class TimedLock:
    """A mutex that measures how long the thread that made it has waited for it.

    Costs: taking a free one reads no clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = threading.get_ident()
        self.waited_s = 0.0

    def __enter__(self) -> TimedLock:
        if not self._lock.acquire(blocking=False):
            begun_s = time.monotonic()
            self._lock.acquire()
            if threading.get_ident() == self._owner:
                self.waited_s += time.monotonic() - begun_s
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class _Program:
    def __init__(
        self, program: Callable[[], None], name: str, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._program = program
        self._around = around
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._around():
                self._program()
        except BaseException as error:
            self.error = error
        finally:
            del self._program  # which may refer to this

    def failed(self) -> bool:
        return self.error is not None

    def join(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


class ThreadConcurrency:
    """Starts programs as daemon threads without gradients, besides the worker's own thread.

    Attributes:
        around: makes the context managers in which programs run, such as one for the GPU stream on which the worker computes:
            locks order work only if their holders use the same stream.
    """

    def __init__(self) -> None:
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._programs: list[_Program] = []
        self._locks: list[TimedLock] = []

    @property
    def waited_s(self) -> float:
        """How long the threads that made locks have waited for them; background programs' waiting does not count."""
        return sum(lock.waited_s for lock in self._locks)

    @waited_s.setter
    def waited_s(self, value: float) -> None:
        for lock in self._locks:
            lock.waited_s = value

    def start(self, program: Callable[[], None], name: str) -> _Program:
        self._programs.append(_Program(program, name, self.around))
        return self._programs[-1]

    def serve(
        self, mailbox: Mailbox, kinds: tuple[str, ...], handle: Callable[[Event | None], float | None], name: str
    ) -> _Program:
        def run() -> None:
            wait_s = handle(None)
            while wait_s is not None:
                wait_s = handle(mailbox.receive(None if wait_s == math.inf else wait_s, kind=kinds))

        return self.start(run, name)

    def lock(self) -> TimedLock:
        self._locks.append(TimedLock())
        return self._locks[-1]
