"""Sparsity of a problem, in the terms of the Hogwild! paper, and whether threads pay.

Omega is the maximum number of coordinates of an example; Delta the largest fraction of examples that share one coordinate;
rho the largest fraction of examples with which one example shares a coordinate. Hogwild!'s bounds are good if they are
small; text has a Delta and a rho near 1 because of its frequent words, and is fast nevertheless.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.sparse.instructions import compiled
from paceline.sparse.linear import Pass
from paceline.sparse.rows import SAMPLE, Rows, count_rows_with, sample_rows
from paceline.sparse.team import Team

_PROBES = 200
_PAIRS = 3


@dataclass(frozen=True)
class Sparsity:
    """Sparsity of a matrix, from `sampled` of its rows."""

    omega: int  # coordinates of the densest example: non-zeros of its row; of a rating, numbers in two factors
    delta: float  # fraction of examples with the most frequent feature; of ratings, of the most frequent user or item
    rho: float  # maximum, over examples, of the fraction of examples that overlap with it
    meeting: float  # fraction of pairs of examples that overlap: the probability that two concurrent updates conflict
    sampled: int


def sparsity_of(rows: Rows, features: int) -> Sparsity:
    """Measures a matrix by a sample of 20,000 rows and 200 probes; exact for smaller ones except for the probes."""
    chosen = sample_rows(rows, SAMPLE)
    if rows.dense:
        return Sparsity(features, 1.0, 1.0, 1.0, chosen.size)
    omega = int(np.diff(rows.begins).max(initial=0))
    delta = float(count_rows_with(rows, chosen, features).max(initial=0) / max(1, chosen.size))
    # The fullest rows overlap with most others; even spacing gives the mean.
    probes = sample_rows(rows, _PROBES)
    lengths = rows.begins[chosen + 1] - rows.begins[chosen]
    fullest = chosen[np.argsort(-lengths, kind="stable")[:_PROBES]]
    meeting = _meetings(rows, probes, chosen, features)
    most = max(meeting.max(initial=0.0), _meetings(rows, fullest, chosen, features).max(initial=0.0))
    return Sparsity(omega, delta, float(most), float(meeting.mean()) if meeting.size else 0.0, chosen.size)


def sparsity_of_ratings(rows: Rows, features: int, rank: int) -> Sparsity:
    """Measures a matrix to be completed, whose examples are its entries: each touches factors of its row and its column."""
    entries = rows.indices.size
    of_row = np.diff(rows.begins)
    of_column = count_rows_with(rows, np.arange(of_row.size), features)
    most, total = _entries_met(rows, of_column)
    delta = max(of_row.max(initial=0), of_column.max(initial=0)) / max(1, entries)
    return Sparsity(2 * rank, float(delta), most / max(1, entries), total / max(1, entries) ** 2, entries)


@compiled
def _entries_met(rows: Rows, of_column: np.ndarray) -> tuple[int, float]:
    """The maximum number of entries, including itself, that share an entry's row or column; and the sum over all."""
    most, total = 0, 0.0
    for row in range(rows.begins.size - 1):
        length = rows.begins[row + 1] - rows.begins[row]
        for k in range(rows.begins[row], rows.begins[row + 1]):
            met = length + of_column[rows.indices[k]] - 1
            most = max(most, met)
            total += met
    return most, total


@compiled(allocates=True)
def _meetings(rows: Rows, probes: np.ndarray, chosen: np.ndarray, features: int) -> np.ndarray:
    """For each probe, the fraction of the chosen rows that share a feature with it."""
    marked = np.full(features, -1, np.int64)
    fractions = np.zeros(probes.size)
    for number, probe in enumerate(probes):
        for k in range(rows.begins[probe], rows.begins[probe + 1]):
            marked[rows.indices[k]] = number
        for row in chosen:
            for k in range(rows.begins[row], rows.begins[row + 1]):
                if marked[rows.indices[k]] == number:
                    fractions[number] += 1
                    break
    return fractions / max(1, chosen.size)


def measure_speed_up(begin: Callable[[Team], Callable[[], Pass]], threads: int) -> float:
    """Speed of `threads` threads relative to one: the median over three pairs of alternating passes."""
    with Team(1) as one, Team(threads) as many:
        passes = begin(one), begin(many)
        # The first pass warms caches and threads.
        times = [[make_pass().seconds for make_pass in passes] for _ in range(_PAIRS + 1)][1:]
    return statistics.median(alone / together for alone, together in times)


def verdict(sparsity: Sparsity, threads: int, wanted: int, speed_up: float | None) -> str:
    """A sentence on whether parallel updates pay here; one thread has no speed-up to judge."""
    if speed_up is None:
        return "One thread: the data is too small for more." if wanted > threads else "One thread was asked for."
    share = f"{sparsity.meeting:.0%}" if sparsity.meeting >= 0.01 else "under 1%"
    meet = f"{share} of pairs of examples meet"
    if speed_up < 1.1:
        return f"Threads do not pay: {threads} make {speed_up:.2f}x of one thread's speed ({meet}); use --n-jobs 1."
    return f"Threads pay: {threads} make {speed_up:.2f}x of one thread's speed; {meet}."
