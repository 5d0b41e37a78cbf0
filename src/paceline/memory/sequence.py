"""A sequence lock: one writes whenever it likes; others copy, and copy again if somebody has written meanwhile.

The word is even while nobody writes. The writer makes it odd before its first store, and even after its last. A copy counts if
the word was even before it and is the same afterwards. The writer never waits, and the word is moved by nothing else: that
somebody counts updates, and when, does not matter.

x86 keeps loads in order, and stores. Other machines, such as aarch64, do not, and atomic accesses order the ordinary ones
around them, of which vectors are written and copied, on one side only. So there are two fences, in the terms of C11 and LLVM:

- `begin` stores the odd word. A store with release ordering stays behind what comes before it, but what comes after it may
  become visible first. The fence behind it forbids that.
- `end` stores the even word with release ordering: behind all stores of the write.
- `read_begin` loads the word with acquire ordering: in front of all loads of the copy.
- `read_end` loads it again. A load with acquire ordering stays in front of what comes after it, but what comes before it may
  be loaded later. The fence in front of it forbids that.

Say that a copy counts, and that both looks saw 2 n. If it has a value of a later write than the n-th, the writer's fence and
the reader's synchronize through that value: the second look sees that write's odd word, or a later one. If it has a value of
an earlier one, then `end` of the n-th write, which the first look saw, does not synchronize with that look. So it has the
n-th write's values alone. All accesses and fences here are sequentially consistent, which is more than that. Vectors are
taken for relaxed atomics: torch's kernels are compiled by themselves, so that no compiler moves them across these, and what is
torn within an element is thrown away with its copy.

Reference: Boehm, "Can Seqlocks Get Along with Programming Language Memory Models?", MSPC 2012.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.memory.atomics import fence, kernel, load, store
from paceline.memory.failpoints import fail_point

__all__ = ["SequenceLock"]

_DEADLINE_S = 60.0
_BETWEEN_TRIES_S = 50e-6


@kernel("void(int64)")
def begin(word: int) -> None:
    """Makes the word odd, another odd one if a writer has died; what is stored from here on is visible after that."""
    store(word, (load(word) + 1) | 1)
    fence()


@kernel("void(int64)")
def end(word: int) -> None:
    """Makes the word even; what was stored before is visible before that."""
    store(word, load(word) + 1)


@kernel("int64(int64)")
def read_begin(word: int) -> int:
    """The word; what is loaded from here on is not older."""
    return load(word)


@kernel("int64(int64)")
def read_end(word: int) -> int:
    """The word; what was loaded before is not newer."""
    fence()
    return load(word)


class SequenceLock:
    """The sequence lock at a word of shared memory that one writer moves, and nothing else does.

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
        """Copies that are made meanwhile do not count."""
        begin(self._word)
        try:
            fail_point(self._name)
            yield
        finally:
            end(self._word)

    def copied(self, copy: Callable[[], int], writer: str) -> int:
        """Calls `copy` until nobody has written during it; returns what it returned then.

        Raises:
            RuntimeError: `writer` was writing at every look for a minute.
        """
        until_s = time.monotonic() + _DEADLINE_S
        while True:
            before = read_begin(self._word)
            if not before & 1:
                found = copy()
                if read_end(self._word) == before:
                    return found
            if time.monotonic() > until_s:
                raise RuntimeError(f"{writer} was writing at every look for {_DEADLINE_S:.0f} s")
            # It may have lost its core (or, with threads, the interpreter) in the middle of a write.
            time.sleep(_BETWEEN_TRIES_S)

    def recover(self) -> bool:
        """Ends the write that a dead writer was in the middle of; returns whether it was."""
        torn = bool(load(self._word) & 1)
        if torn:
            end(self._word)
        return torn
