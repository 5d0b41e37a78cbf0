"""Operations on one row of a matrix: prefetch it, multiply it with weights, add it to weights.

Rows are visited in random order, which the processor cannot predict: without a prefetch, each waits for memory.
Indices are unsigned, so that no code for negative ones is compiled. In a dense matrix all rows share one list of
indices: 0, 1, 2, ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.sparse.instructions import compiled, prefetch
from paceline.sparse.steps import apply_l1

__all__ = ["Rows", "add", "add_adagrad", "apply_l1_to_row", "dot", "prefetch_rows"]

U = np.uint64
FAR = np.uint64(12)
"""Rows ahead whose beginning is prefetched."""
NEAR = np.uint64(6)
"""Rows ahead whose entries are prefetched: their beginning has arrived by then."""


class Rows(NamedTuple):
    """A CSR matrix, or a dense one in CSR form; views of the caller's arrays."""

    begins: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    dense: bool


@compiled
def prefetch_rows(rows: Rows, order: np.ndarray, beside: np.ndarray, position: int, last: int) -> None:
    """Prefetches data of the rows after `position`; `beside` has a number per row, such as its target."""
    far, near = U(position) + FAR, U(position) + NEAR
    if far < U(last):
        prefetch(rows.begins, U(order[far]))  # pyright: ignore[reportCallIssue]
        prefetch(beside, U(order[far]))  # pyright: ignore[reportCallIssue]
    if near < U(last):
        row = U(order[near])
        k, end = U(rows.begins[row]), U(rows.begins[row + U(1)])
        step = U(64 // rows.values.itemsize)
        while k < end:
            if not rows.dense:
                prefetch(rows.indices, k)  # pyright: ignore[reportCallIssue]
            prefetch(rows.values, k)  # pyright: ignore[reportCallIssue]
            k += step


@compiled
def dot(rows: Rows, begin: np.uint64, end: np.uint64, weights: np.ndarray) -> float:
    """The dot product of the row and the weights."""
    shift = begin if rows.dense else U(0)
    total = weights.dtype.type(0.0)
    for k in range(begin, end):
        total += weights[U(rows.indices[k - shift])] * rows.values[k]
    return total


@compiled
def add(rows: Rows, begin: np.uint64, end: np.uint64, weights: np.ndarray, factor: float) -> None:
    """Adds `factor` times the row to the weights."""
    shift = begin if rows.dense else U(0)
    step = weights.dtype.type(factor)
    for k in range(begin, end):
        weights[U(rows.indices[k - shift])] += step * rows.values[k]


@compiled
def add_adagrad(
    rows: Rows, begin: np.uint64, end: np.uint64, weights: np.ndarray, squares: np.ndarray, slope: float, step: float
) -> None:
    """Adds `-step slope x / sqrt(sum of squared gradients)`, coordinate by coordinate."""
    shift = begin if rows.dense else U(0)
    for k in range(begin, end):
        j = U(rows.indices[k - shift])
        gradient = weights.dtype.type(slope) * rows.values[k]
        squares[j] += gradient * gradient
        weights[j] -= weights.dtype.type(step) * gradient / np.sqrt(squares[j])


@compiled
def apply_l1_to_row(
    rows: Rows, begin: np.uint64, end: np.uint64, weights: np.ndarray, width: int, l1_applied: np.ndarray, l1_due: float
) -> None:
    """Applies the L1 penalty that is due to the weights of the row's coordinates (`width` each)."""
    shift = begin if rows.dense else U(0)
    due = weights.dtype.type(l1_due)
    for k in range(begin, end):
        j = U(rows.indices[k - shift])
        for place in range(j * U(width), (j + U(1)) * U(width)):
            before = weights[place]
            if before != 0.0:
                after = apply_l1(before, due, l1_applied[place])
                l1_applied[place] += after - before
                weights[place] = after
