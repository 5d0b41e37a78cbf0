"""A sequence lock: one writer writes at any time; readers copy, and copy again if the writer has written meanwhile.

The word is even except during a write. The writer makes it odd before its first store, and even after its last. A copy is
valid if the word was even before it and is the same afterwards. The writer never waits, and nothing else changes the word;
counting updates is independent of it.

x86 keeps loads in order, and stores. Other machines, such as aarch64, do not, and an atomic access orders the ordinary
accesses around it, such as those of vectors, on one side only. So there are two fences, in the terms of C11 and LLVM:

- `begin` stores the odd word. A store with release ordering cannot move before earlier accesses, but later stores may become
  visible before it. The fence after it prevents that.
- `end` stores the even word with release ordering: after all stores of the write.
- `read_begin` loads the word with acquire ordering: before all loads of the copy.
- `read_end` loads it again. A load with acquire ordering cannot move after later accesses, but earlier loads may happen
  after it. The fence before it prevents that.

Suppose that a copy is valid, and that both loads of the word returned 2 n. If the copy had a value of a write later than the
n-th, the writer's fence and the reader's would synchronize through that value: the second load would see that write's odd
word, or a later one. If it had a value of an earlier write, `end` of the n-th write, which the first load saw, would not have
synchronized with that load. So it has only the n-th write's values. All accesses and fences here are sequentially consistent,
which is stronger than necessary. Vectors count as relaxed atomics: torch's kernels are compiled separately, so no compiler
moves them across these accesses, and an element that is torn is discarded with its copy.

Reference: Boehm, "Can Seqlocks Get Along with Programming Language Memory Models?", MSPC 2012.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.memory.atomics import fence, kernel, load, store
from paceline.memory.failpoints import fail_point

_DEADLINE_S = 60.0
_BETWEEN_TRIES_S = 50e-6


@kernel("void(int64)")
def begin(word: int) -> None:
    """Makes the word odd (a new odd value if a writer has died); later stores become visible after that."""
    store(word, (load(word) + 1) | 1)
    fence()


@kernel("void(int64)")
def end(word: int) -> None:
    """Makes the word even; earlier stores become visible before that."""
    store(word, load(word) + 1)


@kernel("int64(int64)")
def read_begin(word: int) -> int:
    """The word; later loads are not older."""
    return load(word)


@kernel("int64(int64)")
def read_end(word: int) -> int:
    """The word; earlier loads are not newer."""
    fence()
    return load(word)


class SequenceLock:
    """The sequence lock at a word of shared memory that only one writer changes.

    Costs: 0.3 us to write, and as much to copy.

    Args:
        word: address of the word, which is 0 at first.
        name: the fail point in the middle of a write.
    """

    __slots__ = ("_name", "_word")

    def __init__(self, word: int, name: str) -> None:
        self._word, self._name = word, name

    @contextmanager
    def writing(self) -> Iterator[None]:
        begin(self._word)
        try:
            fail_point(self._name)
            yield
        finally:
            end(self._word)

    def copied(self, copy: Callable[[], int], writer: str) -> int:
        """Calls `copy` until no write overlaps with it; returns the result of that call.

        Raises:
            RuntimeError: writes of `writer` overlapped with every try for a minute.
        """
        until_s = time.monotonic() + _DEADLINE_S
        while True:
            before = read_begin(self._word)
            if not before & 1:
                found = copy()
                if read_end(self._word) == before:
                    return found
            if time.monotonic() > until_s:
                raise RuntimeError(f"{writer} was writing at each attempt to read for {_DEADLINE_S:.0f} s")
            # The writer may have lost its core (or, with threads, the interpreter) in the middle of a write.
            time.sleep(_BETWEEN_TRIES_S)

    def recover(self) -> bool:
        """Ends a dead writer's unfinished write; returns whether there was one."""
        torn = bool(load(self._word) & 1)
        if torn:
            end(self._word)
        return torn
