"""A simulated parameter vector behind a mutex or a read-write lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from paceline.simulator.core import Core
from paceline.simulator.scheduler import Program, Scheduler

__all__ = ["LockState", "LockedState", "SimulatedLocked"]


class LockState:
    """A lock whose waiters are served in order; with `sharing`, readers share it and waiting writers go first.

    The mutex (`sharing=False`) is the same lock with writers only. A released lock belongs at once to whoever is woken,
    who runs `wake_s` later, as with a futex that is handed over, or at once if it has waited for less than `spin_s`.

    Attributes:
        readers: how many hold it for reading.
        writer: whether somebody holds it for writing.
    """

    def __init__(self, scheduler: Scheduler, wake_s: float, *, sharing: bool, spin_s: float = 0.0) -> None:
        self.readers = 0
        self.writer = False
        self.sharing = sharing
        self._scheduler = scheduler
        self._wake_s = wake_s
        self._spin_s = spin_s
        self._waiting_readers: deque[tuple[Program, float]] = deque()  # and since when
        self._waiting_writers: deque[tuple[Program, float]] = deque()

    def try_acquire(self, *, write: bool) -> bool:
        """Takes the lock if nobody is in the way."""
        if self.writer or self._waiting_writers:
            return False
        if self.sharing and not write:
            self.readers += 1
            return True
        if self.readers:
            return False
        self.writer = True
        return True

    def queue(self, *, write: bool) -> None:
        """Waits until the lock is handed to this program; call it after a failed attempt."""
        write = write or not self.sharing
        queue = self._waiting_writers if write else self._waiting_readers
        waiting = (self._scheduler.current, self._scheduler.now_s)
        queue.append(waiting)
        try:
            self._scheduler.wait(f"the lock to {'write' if write else 'read'}")
        except BaseException:  # killed: nobody shall hand it the lock, and what it was handed goes to the next
            if waiting in queue:
                queue.remove(waiting)
            else:
                self.release(write=write)
            raise

    def release(self, *, write: bool) -> None:
        """Gives the lock back, and to the next."""
        if self.sharing and not write:
            self.readers -= 1
        else:
            self.writer = False
        if self.readers or self.writer:
            return
        if self._waiting_writers:
            self.writer = True
            self._wake(*self._waiting_writers.popleft())
            return
        while self._waiting_readers:
            self.readers += 1
            self._wake(*self._waiting_readers.popleft())

    def _wake(self, program: Program, since_s: float) -> None:
        spins = self._scheduler.now_s - since_s < self._spin_s
        self._scheduler.wake(program, 0.0 if spins else self._wake_s)


class LockedState:
    """The vector and its lock, one for all workers."""

    def __init__(self, x: torch.Tensor, lock: LockState) -> None:
        self.x = x
        self.version = 0
        self.lock = lock

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the vector (P,) at this instant; returns its version.

        Whole at any instant: an update of a locked vector is written at the end of its time.
        """
        out.copy_(self.x)
        return self.version


class SimulatedLocked:
    """One vector, one writer at a time; implements `LockedParameters`.

    Modelled: an attempt takes one atomic operation; who fails queues in order, or with `backoff` sleeps and tries again.

    Attributes:
        backoff: seconds to sleep after the attempt-th failure (from 0); None: queue.
        waited_s: seconds from a failed attempt until the lock was held; the caller reads it and sets it back to 0.
    """

    def __init__(self, state: LockedState, core: Core) -> None:
        self._state = state
        self._core = core
        self.x = state.x
        self.backoff: Callable[[int], float] | None = None
        self.waited_s = 0.0
        self._reading = _Side(self, write=False)
        self._writing = _Side(self, write=True)

    @property
    def version(self) -> int:
        """Number of updates applied so far."""
        return self._state.version

    def reading(self) -> AbstractContextManager[None]:
        """Holds the lock for reading."""
        return self._reading

    def writing(self) -> AbstractContextManager[None]:
        """Holds the lock for writing."""
        return self._writing

    def advance(self) -> int:
        """Counts one update; returns the version that it made."""
        self._state.version += 1
        return self._state.version

    def take(self, *, write: bool) -> None:
        """Gets one side of the lock and accounts for the wait."""
        lock, core = self._state.lock, self._core
        core.atomic()
        if lock.try_acquire(write=write):
            return
        begun_s = core.scheduler.now_s
        if self.backoff is None:
            lock.queue(write=write)
        else:
            failures = 0
            while True:
                core.scheduler.sleep(self.backoff(failures))
                core.atomic()
                if lock.try_acquire(write=write):
                    break
                failures += 1
        self.waited_s += core.scheduler.now_s - begun_s

    def give(self, *, write: bool) -> None:
        """Releases one side of the lock."""
        self._state.lock.release(write=write)


class _Side:
    """One side of the lock as a context manager."""

    def __init__(self, vector: SimulatedLocked, *, write: bool) -> None:
        self._vector = vector
        self._write = write

    def __enter__(self) -> None:
        self._vector.take(write=self._write)

    def __exit__(self, *exception: object) -> None:
        self._vector.give(write=self._write)
