"""A mutex and a read-write lock on words of shared memory that survive the death of their holder.

A lock word is 0 or the token of its owner. The compare-and-swap that takes a lock is also what records the owner: no
instant exists at which the lock is taken and its owner is unknown, so a supervisor that has declared an incarnation
dead can always give back exactly what that one held (`recover`).

Neither is re-entrant or fair: the first to come when the lock is free takes it. A waiter spins for some microseconds and
then sleeps; it raises `RunStopped` when the abort word is set.
"""

from __future__ import annotations

from paceline.memory.atomics import compare_and_swap, kernel, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.ownership import CONTENDED, owner_token, participant_of
from paceline.memory.segment import LINE_BYTES, Segment
from paceline.memory.waiting import raise_if_stopped, wait_briefly, wake

_FAILED, _TAKEN, _FAILED_AND_WAKE = 0, 1, 2


@kernel("int64(int64)")
def _mark_contended(word: int) -> int:
    """Sets the flag on a lock that is held; returns the value to sleep on, or 0 if the lock is free."""
    while True:
        held = load(word)
        if held == 0 or held & CONTENDED or compare_and_swap(word, held, held | CONTENDED):
            return held | CONTENDED if held else 0


@kernel("int64(int64, int64)")
def _let_go(word: int, token: int) -> int:
    """Frees a lock of this owner; returns whether a waiter sleeps on it, or -1 if it is not this owner's."""
    while True:
        held = load(word)
        if held & ~CONTENDED != token:
            return -1
        if compare_and_swap(word, held, 0):
            return 1 if held & CONTENDED else 0


@kernel("int64(int64, int64, int64, int64)")
def _try_write(word: int, readers: int, num_participants: int, token: int) -> int:
    if not compare_and_swap(word, 0, token):
        return _FAILED
    for reader in range(num_participants):
        if load(readers + reader * LINE_BYTES):
            return _FAILED_AND_WAKE if _let_go(word, token) == 1 else _FAILED
    return _TAKEN


@kernel("boolean(int64, int64, int64)")
def _try_read(word: int, reader: int, token: int) -> bool:
    # First announce the read, then look for a writer. A writer first takes the word, then looks for readers. All four
    # accesses are sequentially consistent, so if a reader and a writer come together, at least one sees the other.
    store(reader, token)
    if load(word) == 0:
        return True
    store(reader, 0)
    return False


@kernel("int64(int64, int64, int64)")
def _stop_reading(word: int, reader: int, token: int) -> int:
    """Returns whether a writer may be waiting, or -1 if this owner does not read."""
    if load(reader) != token:
        return -1
    store(reader, 0)
    return 1 if load(word) else 0


class Mutex:
    """One owner at a time.

    Taking and releasing a free one costs 0.3 us together.

    Args:
        offset: of the word in bytes, zero at first.
        abort_address: word that is nonzero when the run is being stopped; 0: there is none.
    """

    def __init__(
        self, segment: Segment, offset: int, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        self._mapping = segment.mapping
        self._word = segment.address + offset
        self._token = owner_token(participant_id, incarnation)
        self._abort = abort_address

    def try_acquire(self) -> bool:
        if compare_and_swap(self._word, 0, self._token):
            fail_point("lock.taken")
            return True
        return False

    def acquire(self) -> None:
        """Waits for the mutex, and takes it.

        Raises:
            RunStopped: the run ended meanwhile; the mutex is not taken.
            RuntimeError: this participant holds it already.
        """
        if not compare_and_swap(self._word, 0, self._token):
            # After a sleep it is taken as contended: others may still sleep, and a release wakes only one.
            _take_contended(self._word, self._token, self._abort)
        fail_point("lock.taken")

    def release(self) -> None:
        """Gives back the mutex, which this participant must hold."""
        contended = _let_go(self._word, self._token)
        if contended:
            if contended < 0:
                raise RuntimeError("released a mutex that this worker does not hold")
            wake(self._word, 1)

    def recover(self, token: int) -> bool:
        """Releases the locks of a dead owner; returns whether it held the mutex (the guarded data may be half-written).

        Called by the supervisor after it declared that incarnation dead and made sure that it no longer runs.
        """
        held = _let_go(self._word, token) >= 0
        wake(self._word)
        return held


class ReadWriteLock:
    """Many readers or one writer; a writer that waits keeps new readers out.

    The writer word is a mutex among writers. Each participant has a reader word of its own: a count of readers could
    not be repaired when one of them dies, since it would be unknown whether that one had been counted. A writer takes the
    writer word, which stops new readers at once, and then waits for those inside; arriving readers never delay it.
    Readers starve if writers follow each other without a gap.

    Taking and releasing a free one costs about 0.4 us.
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,  # of `1 + num_participants` words, `LINE_BYTES` apart, zero at first
        num_participants: int,
        participant_id: int,
        incarnation: int = 0,
        abort_address: int = 0,  # word that is nonzero when the run is being stopped; 0: there is none
    ) -> None:
        self._mapping = segment.mapping
        self._num_participants = num_participants
        self._word = segment.address + offset
        self._readers = self._word + LINE_BYTES
        self._reader = self._readers + participant_id * LINE_BYTES
        self._token = owner_token(participant_id, incarnation)
        self._abort = abort_address

    def try_acquire_read(self) -> bool:
        """Starts to read if no writer holds the lock or waits for it."""
        if _try_read(self._word, self._reader, self._token):
            fail_point("lock.taken")
            return True
        wake(self._reader)  # a writer may have seen our word and sleep until it changes
        return False

    def acquire_read(self) -> None:
        """Waits until it can read, and starts.

        Raises:
            RunStopped: the run ended meanwhile; nothing is taken.
            RuntimeError: this participant holds the write side.
        """
        while not self.try_acquire_read():
            if held := _mark_contended(self._word):
                _raise_if_own(held, self._token)
                wait_briefly(self._word, held)
            raise_if_stopped(self._abort)

    def release_read(self) -> None:
        """Ends this participant's reading; raises `RuntimeError` if it does not read."""
        writer_waits = _stop_reading(self._word, self._reader, self._token)
        if writer_waits:
            if writer_waits < 0:
                raise RuntimeError("released the read side of a lock that this worker does not hold")
            wake(self._reader)

    def try_acquire_write(self) -> bool:
        outcome = _try_write(self._word, self._readers, self._num_participants, self._token)
        if outcome == _TAKEN:
            fail_point("lock.taken")
            return True
        if outcome == _FAILED_AND_WAKE:
            wake(self._word)
        return False

    def acquire_write(self) -> None:
        """Waits for the lock, and takes it for writing.

        Raises:
            RunStopped: the run ended meanwhile; nothing is taken.
            RuntimeError: this participant holds the lock already.
        """
        if self.try_acquire_write():
            return
        if load(self._reader) == self._token:
            raise RuntimeError("this worker reads under the lock that it wants for writing; it would wait for itself")
        _take_contended(self._word, self._token, self._abort)
        fail_point("lock.taken")
        try:
            for reader in range(self._num_participants):
                word = self._readers + reader * LINE_BYTES
                while seen := load(word):
                    wait_briefly(word, seen)
                    raise_if_stopped(self._abort)
        except BaseException:  # KeyboardInterrupt as well: the readers must not wait for a writer that gave up
            self.release_write()
            raise

    def release_write(self) -> None:
        """Ends this participant's writing; raises `RuntimeError` if it does not write."""
        contended = _let_go(self._word, self._token)
        if contended:
            if contended < 0:
                raise RuntimeError("released the write side of a lock that this worker does not hold")
            wake(self._word)  # readers and writers sleep on the same word: all may be able to go on

    def recover(self, token: int) -> bool:
        """Releases the locks of a dead owner; returns whether it held the write side (see `Mutex.recover`)."""
        reader = self._readers + participant_of(token) * LINE_BYTES
        compare_and_swap(reader, token, 0)
        wake(reader)
        held = _let_go(self._word, token) >= 0
        wake(self._word)
        return held


def _take_contended(word: int, token: int, abort_address: int) -> None:
    while not compare_and_swap(word, 0, token | CONTENDED):
        if held := _mark_contended(word):
            _raise_if_own(held, token)
            wait_briefly(word, held)
        raise_if_stopped(abort_address)


def _raise_if_own(held: int, token: int) -> None:
    if held & ~CONTENDED == token:
        raise RuntimeError("this worker already holds the lock that it wants; it would wait for itself")
