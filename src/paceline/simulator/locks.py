"""A simulated parameter vector behind a mutex or a read-write lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.simulator.hardware.core import Core
from paceline.simulator.memory import SimulatedVector
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class _LockWaiter:
    """A program that found the lock held."""

    program: Program
    since_s: float  # when it began to spin; after `spin_s` it sleeps


class LockState:
    """A lock that the first to try gets once it is free, like `memory.locks`: neither fair nor handed over.

    A program that finds it held spins for `spin_s` and then sleeps. On a release, spinning programs retry at once, in the
    order in which they began to spin. A release also wakes the first program that sleeps on a mutex, or all that sleep on a
    read-write lock. They run `wake_s` later and retry; if another program was faster, they spin again and then sleep behind
    the others. A release wakes none if the lock was free when it was taken and no program has come since: the lock word
    records that.

    A writer of a read-write lock (`sharing`) takes the word, which keeps new readers out, and then waits for active readers.
    """

    def __init__(self, scheduler: Scheduler, wake_s: float, *, sharing: bool, spin_s: float = 0.0) -> None:
        self.readers = 0  # the number of programs that hold it for reading
        self.writer = False  # whether its word is taken: by a writer, or by any program if it is a mutex
        self.sharing = sharing  # whether readers share it; a mutex is the same lock with writers only
        self._scheduler = scheduler
        self._wake_s = wake_s
        self._spin_s = spin_s
        self._is_contended = False
        self._waiting: deque[_LockWaiter] = deque()  # for the word to be free, in the order in which they began to
        self._drains: _LockWaiter | None = None  # the writer that has the word and waits for readers

    def try_acquire(self, *, write: bool) -> bool:
        if self.writer or (self.readers and (write or not self.sharing)):
            return False
        if self.sharing and not write:
            self.readers += 1
        else:
            self.writer = True
        return True

    def acquire(self, *, write: bool) -> None:
        """Waits until this program has the lock; call it after a failed attempt."""
        if self.sharing and not write:
            while self.writer:
                self._is_contended = True
                self._wait_for_word("read")
            self.readers += 1
            return
        while self.writer:
            self._is_contended = True
            self._wait_for_word("write")
        self.writer = self._is_contended = True
        if self.readers:
            self._wait_for_readers()

    def _wait_for_word(self, what: str) -> None:
        waiter = _LockWaiter(self._scheduler.current, self._scheduler.now_s)
        self._waiting.append(waiter)
        try:
            self._scheduler.wait(f"the lock to {what}")
        except BaseException:  # killed; pass its wake-up on to the next
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif self.writer:
                self._is_contended = True
            else:
                self._wake_sleepers()
            raise

    def _wait_for_readers(self) -> None:
        self._drains = _LockWaiter(self._scheduler.current, self._scheduler.now_s)
        try:
            self._scheduler.wait("the readers of the lock that it is about to write under")
        except BaseException:  # killed
            self.release(write=True)
            raise
        finally:
            self._drains = None

    def release(self, *, write: bool) -> None:
        if self.sharing and not write:
            self.readers -= 1
            if not self.readers and self._drains is not None:
                self._wake(self._drains)
            return
        self.writer = False
        was_contended, self._is_contended = self._is_contended, False
        spinning = [waiter for waiter in self._waiting if self._spins(waiter)]
        for waiter in spinning:
            self._waiting.remove(waiter)
            self._wake(waiter)
        if was_contended:
            self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        """Wakes the first sleeping program; of a read-write lock, all."""
        for _ in range(len(self._waiting) if self.sharing else min(1, len(self._waiting))):
            self._wake(self._waiting.popleft())

    def _wake(self, waiter: _LockWaiter) -> None:
        self._scheduler.wake(waiter.program, 0.0 if self._spins(waiter) else self._wake_s)

    def _spins(self, waiter: _LockWaiter) -> bool:
        return self._scheduler.now_s - waiter.since_s < self._spin_s


class LockedState(SimulatedVector):
    """The vector and its lock, one for all workers; always consistent, as an update is written when its time ends."""

    def __init__(self, x: torch.Tensor, lock: LockState) -> None:
        super().__init__(x)
        self.lock = lock

    def of(self, core: Core) -> SimulatedLocked:
        return SimulatedLocked(self, core)


class SimulatedLocked:
    """One vector, one writer at a time; implements `LockedParameters`.

    Modelled: the first attempt takes one atomic operation. After a failure the worker waits as `LockState` does, or with
    `backoff` sleeps and tries again.

    Attributes:
        backoff: seconds to sleep after the attempt-th failure (from 0); None: wait instead.
        waited_s: seconds from a failed attempt until the lock was held; the caller reads it and resets it to 0.
    """

    def __init__(self, state: LockedState, core: Core) -> None:
        self.x, self.advance = state.x, state.advance
        self._state = state
        self.backoff: Callable[[int], float] | None = None
        self.waited_s = 0.0
        self._reading = _SimulatedSide(self, state.lock, core, write=False)
        self._writing = _SimulatedSide(self, state.lock, core, write=True)

    @property
    def version(self) -> int:
        return self._state.version

    def reading(self) -> AbstractContextManager[None]:
        return self._reading

    def writing(self) -> AbstractContextManager[None]:
        return self._writing


@dataclass(eq=False, slots=True)
class _SimulatedSide(AbstractContextManager[None]):
    vector: SimulatedLocked
    lock: LockState
    core: Core
    write: bool

    def __enter__(self) -> None:
        vector, lock, core, write = self.vector, self.lock, self.core, self.write
        core.atomic()
        if lock.try_acquire(write=write):
            return
        begun_s = core.scheduler.now_s
        if vector.backoff is None:
            lock.acquire(write=write)
        else:
            failures = 0
            while True:
                core.scheduler.sleep(vector.backoff(failures))
                core.atomic()
                if lock.try_acquire(write=write):
                    break
                failures += 1
        vector.waited_s += core.scheduler.now_s - begun_s

    def __exit__(self, *exception: object) -> None:
        self.lock.release(write=self.write)
