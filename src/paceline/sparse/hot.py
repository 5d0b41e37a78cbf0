"""A copy of the weights per thread, merged coordinate by coordinate, the hot ones most often.

A cache line that two threads write in turn moves between the cores' caches at every update. In text, a few words are in
most rows; and even without hot features, each core's cache has the weights that the other writes. A test of each non-zero
for hot coordinates would cost as much as the non-zero. So each thread updates a copy of all weights and periodically
*merges*: it adds its changes since the last merge to the shared vector, and takes the shared value as its new one.

Merged too seldom, both threads correct the same error, and the sum overshoots; merged after every update, nothing is gained.
So each coordinate is merged after about `VISITS` updates of the team. Coordinates are in tiers of periods, each four times
the previous one: the hottest few every `VISITS` examples, and so on. From the period at which most coordinates are due, the
whole vector is swept. Coordinates that are updated less often than that are merged at the end of a pass, and intercepts,
which every example changes, with the hottest.

The shared values of hot coordinates are contiguous, in a separate vector: a cache line, whose transfer from the other core
costs as much as ten non-zeros, then carries sixteen of them. Their entries of the shared vector are unused during a pass.

Merges lose no updates, and no thread waits. A thread that is preempted in the middle of a non-atomic addition would undo
all that others have merged meanwhile, so a thread that finds another merging postpones its own merge. Measurements:
benchmarks/results/sparse.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.memory.atomics import compare_and_swap, store
from paceline.sparse.instructions import add_atomically, compiled

VISITS = 128
LINE = 64
"""Bytes of a line of the cache."""
U = np.uint64


class Copies(NamedTuple):
    """A thread's own arrays, and when it merges."""

    own: np.ndarray  # its weights
    bases: np.ndarray  # their values after the last merge; empty: `own` is the shared vector
    hot: np.ndarray  # coordinates that are exchanged in `exchange`, the most frequent first
    exchange: np.ndarray  # their shared values, of all threads
    hot_bases: np.ndarray  # their values after the last merge
    hot_kept: np.ndarray  # buffer for them during a sweep
    ends: np.ndarray  # how many of `hot` each tier takes
    periods: np.ndarray  # examples between a tier's merges
    sweep: int  # examples between merges of all coordinates; 0: at the end of the pass only
    late: int  # offset of the thread's counter, so that threads do not merge at the same moment
    every: int  # examples between merges of the intercepts; 0: a lone thread, which writes to the model itself
    intercepts: np.ndarray
    intercept_bases: np.ndarray
    products: np.ndarray  # one per class, for a row
    slopes: np.ndarray


@dataclass(frozen=True)
class Tiers:
    """When each coordinate is merged; `hot` identifies coordinates by their feature."""

    hot: np.ndarray
    ends: tuple[int, ...]
    periods: tuple[int, ...]
    sweep: int


def tiers_for(frequencies: np.ndarray, examples: int, threads: int) -> Tiers:
    """Chooses tiers from each feature's fraction of examples.

    Nothing is merged less often than once in a thread's `examples` of a pass. More `threads` make more changes between two
    merges.
    """
    visits = max(1, VISITS // threads)
    ends, periods, least = [], [], []
    period, sweep = visits, 0
    while period < examples:
        # Half of `visits`: coordinates that barely miss a tier then wait twice as long for a merge, not four times.
        least.append(0.5 * visits / period)
        due = int(np.count_nonzero(frequencies >= least[-1]))
        if due > frequencies.size // 8:
            sweep = period
            break
        ends.append(due)
        periods.append(period)
        period *= 4
    hot = np.flatnonzero(frequencies >= least[len(ends) - 1]) if ends else np.zeros(0, np.int64)
    hot = hot[np.argsort(-frequencies[hot], kind="stable")]
    return Tiers(hot, tuple(ends), tuple(periods), sweep)


def thread_copies(threads: int, shared: np.ndarray, classes: int, tiers: Tiers | None) -> list[Copies]:
    """Each thread's copies. Without tiers, all threads write to the shared vector, and only intercepts have copies."""
    every = max(1, VISITS // threads) if threads > 1 else 0
    copying = tiers is not None and threads > 1
    plan = tiers if tiers is not None and threads > 1 else Tiers(np.zeros(0, np.int64), (), (), 0)
    # Coordinate j of class k is at j * classes + k.
    hot = (plan.hot[:, None] * classes + np.arange(classes)).reshape(-1).astype(np.uint32)
    exchange = np.zeros(hot.size, shared.dtype)
    return [
        Copies(
            own=np.empty_like(shared) if copying else shared,
            bases=np.empty(shared.size if copying else 0, shared.dtype),
            hot=hot,
            exchange=exchange,
            hot_bases=_apart(hot.size, shared.dtype),
            hot_kept=_apart(hot.size, shared.dtype),
            ends=np.asarray(plan.ends, np.int64) * classes,
            periods=np.asarray(plan.periods, np.int64),
            sweep=plan.sweep,
            late=thread * (every + max((plan.sweep, *plan.periods))) // threads,
            every=every,
            intercepts=_apart(classes, np.float64),
            intercept_bases=_apart(classes, np.float64),
            products=_apart(classes, shared.dtype),
            slopes=_apart(classes, shared.dtype),
        )
        for thread in range(threads)
    ]


def _apart(count: int, kind: Any) -> np.ndarray:
    """Zeros that share no cache line with another array, to avoid false sharing."""
    room = LINE // np.dtype(kind).itemsize
    return np.zeros(room + count + room, kind)[room : room + count]


@compiled
def copy_model(copies: Copies, shared: np.ndarray, intercepts: np.ndarray) -> None:
    """Copies the current model; each thread does this first in a pass."""
    if copies.bases.size:
        for place in range(shared.size):
            copies.own[place] = copies.bases[place] = shared[place]
        for number in range(copies.hot.size):
            copies.own[U(copies.hot[number])] = copies.hot_bases[number] = copies.exchange[number]
    for number in range(intercepts.size):
        copies.intercepts[number] = copies.intercept_bases[number] = intercepts[number]


@compiled
def merge(copies: Copies, shared: np.ndarray, since: int, words: int) -> None:
    """Merges the coordinates due after `since` examples; `words` is the address of two lines, zero at first."""
    sweeps = copies.sweep > 0 and since % copies.sweep == 0
    tier = copies.periods.size - 1
    while tier >= 0 and not sweeps and since % copies.periods[tier] != 0:
        tier -= 1
    if tier >= 0 and compare_and_swap(words, 0, 1):
        for number in range(U(copies.ends[tier])):
            place = U(copies.hot[number])
            merged = copies.exchange[number] + (copies.own[place] - copies.hot_bases[number])
            copies.own[place] = copies.hot_bases[number] = copies.exchange[number] = merged
        store(words, 0)
    if sweeps and compare_and_swap(words + LINE, 0, 1):
        for number in range(copies.hot.size):
            copies.hot_kept[number] = copies.own[U(copies.hot[number])]
        for place in range(shared.size):
            change = copies.own[place] - copies.bases[place]
            if change != 0.0:  # a value added just now must not be written back
                shared[place] += change
            copies.own[place] = copies.bases[place] = shared[place]
        for number in range(copies.hot.size):
            copies.own[U(copies.hot[number])] = copies.hot_kept[number]
        store(words + LINE, 0)


@compiled
def merge_intercept(copies: Copies, shared: np.ndarray, number: int, own: float) -> float:
    """Merges an intercept; returns the thread's new one."""
    change = own - copies.intercept_bases[number]
    merged = add_atomically(shared, U(number), change) + change  # pyright: ignore[reportCallIssue]
    copies.intercept_bases[number] = merged
    return merged


def fill_exchange(team: list[Copies], shared: np.ndarray) -> None:
    """Copies the model's hot coordinates to the exchange, before threads begin."""
    if team[0].hot.size:
        np.take(shared, team[0].hot, out=team[0].exchange)


def collect(team: list[Copies], shared: np.ndarray, intercepts: np.ndarray) -> None:
    """Adds unmerged changes of threads to the model; none may be running."""
    for copies in team:
        _collect(copies, shared, intercepts)
    if team[0].hot.size:
        shared[team[0].hot] = team[0].exchange


@compiled
def _collect(copies: Copies, shared: np.ndarray, intercepts: np.ndarray) -> None:
    for number in range(copies.hot.size):
        place = U(copies.hot[number])
        copies.exchange[number] += copies.own[place] - copies.hot_bases[number]
    for place in range(copies.bases.size):
        shared[place] += copies.own[place] - copies.bases[place]
    for number in range(intercepts.size):
        intercepts[number] += copies.intercepts[number] - copies.intercept_bases[number]
