"""Matrix completion: factors of a partially known matrix, learned by Hogwild!.

Threads claim chunks of rows (users). Each row's factor is then exclusive to one thread, read and written in cache; only
the factors of columns (items) are shared without locks. Rows come in random order, a row's entries in stored order.

    e = mean + b_u + b_v + L_u . R_v - z
    L_u <- (1 - gamma alpha / |E_u|) L_u - gamma e R_v;   R_v <- (1 - gamma alpha / |E_v|) R_v - gamma e L_u (the old one)

Reference: Niu, Recht, Ré, Wright, "Hogwild!", 2011, arXiv:1106.5730, section 2, with biases added. Numbers are learned
in units of the entries' standard deviation, so that step sizes do not depend on the scale of the ratings.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from paceline.memory.atomics import fetch_add, load
from paceline.sparse.instructions import compiled
from paceline.sparse.linear import DivergedError, Pass
from paceline.sparse.rows import Rows, count_rows_with, prefetch_rows
from paceline.sparse.team import Team, shuffle

U = np.uint64
CHUNK = 32


class Factors(NamedTuple):
    """The parameters: factors (count, rank) and biases (count) of rows and columns."""

    rows: np.ndarray
    columns: np.ndarray
    row_biases: np.ndarray
    column_biases: np.ndarray


@compiled
def complete(
    rows: Rows,
    order: np.ndarray,
    factors: Factors,
    counts: np.ndarray,
    centre: float,
    unit: float,
    eta: float,
    alpha: float,
    biased: bool,
    chunk_rows: int,
    clock: int,
    report: np.ndarray,
) -> None:
    """One thread's part of a pass; adds squared errors, entries, and rows that others claimed meanwhile to `report`."""
    left, right = factors.rows, factors.columns
    rank = U(left.shape[1])
    kind = left.dtype.type
    while True:
        chunk = fetch_add(clock, 1)
        start = chunk * chunk_rows
        if start >= order.size:
            break
        for position in range(start, min(start + chunk_rows, order.size)):
            prefetch_rows(rows, order, factors.row_biases, position, order.size)
            u = U(order[U(position)])
            head, end = U(rows.begins[u]), U(rows.begins[u + U(1)])
            if head == end:
                continue
            shift = head if rows.dense else U(0)
            keep_row = kind(1.0 - eta * alpha / float(end - head))
            for k in range(head, end):
                v = U(rows.indices[k - shift])
                error = kind((float(rows.values[k]) - centre) / unit)
                if biased:
                    error -= factors.row_biases[u] + factors.column_biases[v]
                product = kind(0.0)
                for i in range(rank):
                    product += left[u, i] * right[v, i]
                error -= product
                report[0] += float(error) * float(error)
                step = kind(eta) * error
                keep_column = kind(1.0 - eta * alpha / counts[v])
                for i in range(rank):
                    old = left[u, i]
                    left[u, i] = keep_row * old + step * right[v, i]
                    right[v, i] = keep_column * right[v, i] + step * old
                if biased:
                    factors.row_biases[u] = keep_row * factors.row_biases[u] + step
                    factors.column_biases[v] = keep_column * factors.column_biases[v] + step
            report[1] += float(end - head)
        report[2] += (load(clock) - chunk - 1) * chunk_rows


class Completion:
    """Passes over the known entries of a matrix.

    Args:
        rows: the matrix; stored entries are known, and all of a dense matrix. Not copied.
        biased: learn a bias of each row and column.
        seed: of the first factors and of the order.
        spread: standard deviation of the first factors.
    """

    def __init__(
        self, rows: Rows, features: int, rank: int, *, alpha: float, biased: bool, team: Team, seed: int, spread: float
    ) -> None:
        self.rows, self.team, self._alpha, self._biased, self._seed = rows, team, alpha, biased, seed
        count, kind = rows.begins.size - 1, rows.values.dtype
        random = np.random.default_rng(seed)
        self.factors = Factors(
            random.standard_normal((count, rank)).astype(kind) * kind.type(spread),
            random.standard_normal((features, rank)).astype(kind) * kind.type(spread),
            np.zeros(count, kind),
            np.zeros(features, kind),
        )
        self.centre = float(rows.values.mean(dtype=np.float64)) if rows.values.size and biased else 0.0
        unit = math.sqrt(
            float(np.var(rows.values, dtype=np.float64)) + (0.0 if biased else float(rows.values.mean()) ** 2)
        )
        self.unit = unit or 1.0
        every = np.arange(count)
        counts = np.full(features, count) if rows.dense else count_rows_with(rows, every, features)
        self._counts = np.maximum(counts, 1).astype(np.float64)
        self._order = np.arange(count, dtype=np.int32)
        self.passes: list[Pass] = []

    def make_pass(self, eta: float) -> Pass:
        """Visits every known entry once; the loss is the root mean squared error during the pass, in the matrix's units.

        Raises:
            DivergedError: a factor is not finite afterwards.
        """
        began_s = time.perf_counter()
        shuffle(self._order, self._seed * 1_000_003 + len(self.passes))
        report = np.zeros((self.team.threads, 8))
        chunk = max(1, min(CHUNK, self._order.size // (4 * self.team.threads)))
        self.team.run(
            lambda thread: complete(
                self.rows, self._order, self.factors, self._counts, self.centre, self.unit, eta, self._alpha,
                self._biased, chunk, self.team.clock, report[thread],
            )
        )  # fmt: skip
        squares, entries, others = report.sum(axis=0)[:3]
        if not all(np.isfinite(part).all() for part in self.factors) or not math.isfinite(squares):
            raise DivergedError(
                f"The factors are not finite after pass {len(self.passes) + 1}: the steps are too large; make eta0 smaller."
            )
        loss = self.unit * math.sqrt(squares / max(entries, 1.0))
        self.passes.append(
            Pass(loss, time.perf_counter() - began_s, int(entries), others / max(1, self._order.size), 0)
        )
        return self.passes[-1]
