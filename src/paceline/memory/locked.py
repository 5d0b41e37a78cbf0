"""A parameter vector behind a lock: a mutex or a read-write lock (the memory of lock-based asynchronous SGD)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline.memory.atomics import compare_and_swap, kernel, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.locks import Mutex, ReadWriteLock
from paceline.memory.ownership import owner_token
from paceline.memory.segment import Layout
from paceline.memory.segment_part import OneVector, PartPlan
from paceline.memory.waiting import raise_if_stopped, sleep_precisely


@kernel("int64(int64, int64, int64)")
def _advance(version: int, writing: int, token: int) -> int:
    if load(writing) != token:
        return -1
    store(version, load(version) + 1)
    return load(version)


class LockedVector(OneVector):
    """One vector, one writer at a time; implements `LockedParameters`.

    Every gradient is computed from a consistent copy. Workers queue for the lock or, with `backoff`, try and sleep.
    Costs, uncontended: `reading()` 0.6 us, `writing()` 1 us; one copy of the parameters here and one per worker.

    Args:
        kind: `"mutex"` (readers exclude each other too) or `"rwlock"` (readers share; waiting writers go first). The
            same for all participants.
    """

    def __init__(self, *place: Any, kind: Literal["mutex", "rwlock"] = "mutex", **named: Any) -> None:
        super().__init__(*place, **named)
        self.waited_s = 0.0  # seconds spent waiting for the lock; the caller reads it and sets it back to 0
        # Seconds to sleep after the attempt-th failure (from 0) before trying the lock again; None: queue.
        self.backoff: Callable[[int], float] | None = None
        self.writing_word = self._word("writing")
        self.token = owner_token(self._participant, self._incarnation)
        offset, who = self._plan.at["lock"], (self._participant, self._incarnation, self._abort)
        if kind == "mutex":
            lock = Mutex(self._segment, offset, *who)
            self._reading = _LockSide(self, lock.try_acquire, lock.acquire, lock.release)
            self._writing = _WriteSide(self, lock.try_acquire, lock.acquire, lock.release)
        else:
            lock = ReadWriteLock(self._segment, offset, self._plan.num_participants, *who)
            self._reading = _LockSide(self, lock.try_acquire_read, lock.acquire_read, lock.release_read)
            self._writing = _WriteSide(self, lock.try_acquire_write, lock.acquire_write, lock.release_write)
        self._lock = lock

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        return {
            "x": layout.vector("locked.x", plan.num_parameters, plan.dtype),
            "version": layout.words("locked.version", 1),
            "writing": layout.words("locked.writing", 1),  # the token of a writer between its first and its last write
            "lock": layout.words("locked.lock", 1 + plan.num_participants),
        }

    def reading(self) -> AbstractContextManager[None]:
        return self._reading

    def writing(self) -> AbstractContextManager[None]:
        return self._writing

    def advance(self) -> int:
        """Counts one update, inside `writing()`; returns the version that it made."""
        version = _advance(self._version, self.writing_word, self.token)
        if version < 0:
            raise RuntimeError("advance() counts an update, so it belongs inside `with writing():`")
        return version

    def snapshot(self, out: torch.Tensor) -> int:
        with self._reading:
            out.copy_(self.x)
            return self.version

    def replace(self, x: torch.Tensor) -> None:
        with self._writing:
            self.x.copy_(x)

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Releases the locks of a dead worker; returns whether it was writing (its last update may be torn)."""
        token = owner_token(participant_id, incarnation)
        # First the mark, then the lock: the next owner sets a mark of its own.
        torn = compare_and_swap(self.writing_word, token, 0)
        self._lock.recover(token)
        return torn

    def take(self, try_acquire: Callable[[], bool], acquire: Callable[[], None]) -> None:
        """Gets one side of the lock and accounts for the wait; reads the clock only if there is one."""
        if try_acquire():
            return
        began_s = time.perf_counter()
        try:
            if self.backoff is None:
                acquire()
                return
            attempt = 0
            while True:
                sleep_precisely(self.backoff(attempt), self._abort)
                if try_acquire():
                    return
                raise_if_stopped(self._abort)
                attempt += 1
        finally:
            self.waited_s += time.perf_counter() - began_s


@dataclass(slots=True)
class _LockSide:
    """One side of the lock as a context manager: made once per vector, since a generator would cost 1 us per use."""

    _vector: LockedVector
    _try_acquire: Callable[[], bool]
    _acquire: Callable[[], None]
    _release: Callable[[], None]

    def __enter__(self) -> None:
        self._vector.take(self._try_acquire, self._acquire)

    def __exit__(self, *exception: object) -> None:
        self._release()


class _WriteSide(_LockSide):
    """The write side also marks the vector, so that a kill before the first write is not taken for a torn update."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        store(self._vector.writing_word, self._vector.token)
        fail_point("locked.mid_write")

    def __exit__(self, *exception: object) -> None:
        store(self._vector.writing_word, 0)
        self._release()
