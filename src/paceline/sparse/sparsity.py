"""How sparse a problem is, in the words of the Hogwild! paper, and whether threads pay.

Omega is the most coordinates that an example has; Delta the largest fraction of examples that share one coordinate; rho
the largest fraction of examples that one example shares a coordinate with. Hogwild!'s bounds are good where they are
small; text has a Delta and a rho near 1 because of its frequent words, and is fast nevertheless.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from paceline.sparse.instructions import compiled
from paceline.sparse.linear import LinearModel
from paceline.sparse.matrix import SAMPLE, count_rows_with, sample_rows
from paceline.sparse.rows import Rows
from paceline.sparse.steps import Plan
from paceline.sparse.team import Team

__all__ = ["Sparsity", "measure_speed_up", "sparsity_of", "verdict"]

_PROBES = 200


@dataclass(frozen=True)
class Sparsity:
    """Of a matrix, from `sampled` of its rows.

    Attributes:
        omega: non-zeros of the fullest row.
        delta: fraction of rows that have the most frequent feature.
        rho: fraction of rows that meet the row which meets most.
        meeting: fraction of pairs of rows that meet: the chance that two updates at the same time conflict.
    """

    omega: int
    delta: float
    rho: float
    meeting: float
    sampled: int


def sparsity_of(rows: Rows, features: int) -> Sparsity:
    """Measure a matrix; a sample of 20,000 rows and 200 probes among them is exact for smaller ones but for the probes."""
    chosen = sample_rows(rows, SAMPLE)
    if rows.dense:
        return Sparsity(features, 1.0, 1.0, 1.0, chosen.size)
    omega = int(np.diff(rows.begins).max(initial=0))
    delta = float(count_rows_with(rows, chosen, features).max(initial=0) / max(1, chosen.size))
    # The fullest rows meet most others; even distances give the mean.
    probes = sample_rows(rows, _PROBES)
    lengths = rows.begins[chosen + 1] - rows.begins[chosen]
    fullest = chosen[np.argsort(-lengths, kind="stable")[:_PROBES]]
    meeting = _meetings(rows, probes, chosen, features)
    most = max(meeting.max(initial=0.0), _meetings(rows, fullest, chosen, features).max(initial=0.0))
    return Sparsity(omega, delta, float(most), float(meeting.mean()) if meeting.size else 0.0, chosen.size)


@compiled(allocates=True)
def _meetings(rows: Rows, probes: np.ndarray, chosen: np.ndarray, features: int) -> np.ndarray:
    """Of each probe, the fraction of the chosen rows that share a feature with it."""
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


def measure_speed_up(
    rows: Rows,
    targets: np.ndarray,
    plan: Plan,
    features: int,
    outputs: int,
    threads: int,
    *,
    pairs: int = 3,
    discipline: str = "copies",
) -> float:
    """Examples per second of `threads` threads over those of one, on passes made for this: the median of pairs."""
    seconds: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(pairs + 1):  # the first warms caches and threads
        for count, times in seconds.items():
            with Team(count) as team:
                learning = LinearModel(features, outputs, rows.values.dtype).learn(
                    rows, targets, plan, team, discipline=discipline
                )
                times.append(learning.make_pass().seconds)
    return statistics.median(one / many for one, many in zip(seconds[1][1:], seconds[threads][1:], strict=True))


def verdict(sparsity: Sparsity, threads: int, wanted: int, speed_up: float | None) -> str:
    """Whether parallel updates pay here, in a sentence."""
    if threads == 1:
        return "One thread: the data is too small for more." if wanted > 1 else "One thread was asked for."
    if speed_up is None:
        return f"{threads} threads; whether they pay was not measured."
    meet = f"{sparsity.meeting:.0%} of pairs of examples meet"
    if speed_up < 1.1:
        return f"Threads do not pay: {threads} make {speed_up:.2f}x of one thread's speed ({meet}); use --n-jobs 1."
    return f"Threads pay: {threads} make {speed_up:.2f}x of one thread's speed; {meet}."
