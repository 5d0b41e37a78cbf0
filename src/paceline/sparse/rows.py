"""A view of a user's matrix for the kernels, and operations on one row: prefetch it, multiply it, add it to weights.

Rows are visited in random order, which the processor cannot predict: without a prefetch, each waits for memory.
Indices are unsigned, so that no code for negative ones is compiled. In a dense matrix all rows share one list of
indices: 0, 1, 2, ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from paceline.sparse.instructions import compiled, prefetch
from paceline.sparse.steps import apply_l1

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


_SMALL = 1_000_000
SAMPLE = 20_000


def rows_of(matrix: Any) -> Rows:
    """Views a CSR or C-contiguous dense matrix of single or double precision.

    Large matrices keep 64-bit indices, for which the kernels are compiled separately; those of small matrices are narrowed.
    """
    if sparse.issparse(matrix):
        kind = matrix.indices.dtype
        if kind != np.int32 and matrix.nnz < _SMALL and matrix.shape[1] < 2**31:
            kind = np.dtype(np.int32)
        begins, indices = (np.ascontiguousarray(array, kind) for array in (matrix.indptr, matrix.indices))
        return Rows(_writable(begins), _writable(indices), _writable(np.ascontiguousarray(matrix.data)), False)
    count, width = matrix.shape
    kind = np.int32 if matrix.size < 2**31 else np.int64
    begins = np.arange(0, count * width + 1, max(width, 1), dtype=kind)
    return Rows(begins, np.arange(width, dtype=kind), _writable(np.ascontiguousarray(matrix).reshape(-1)), True)


class _Alias:
    """Memory under another array interface."""

    def __init__(self, array: np.ndarray) -> None:
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self.keeps = array


def _writable(array: np.ndarray) -> np.ndarray:
    """The same memory, marked as writable.

    Numba treats read-only arrays as another type, and would compile kernels again. No kernel writes to a matrix.
    """
    return array if array.flags.writeable or not array.size else np.asarray(_Alias(array))


def sample_rows(rows: Rows, limit: int) -> np.ndarray:
    """Evenly spaced row numbers, so that results are deterministic; all rows if there are few."""
    count = rows.begins.size - 1
    return np.unique(np.linspace(0, count - 1, min(count, limit)).astype(np.int64)) if count else np.zeros(0, np.int64)


def frequencies(rows: Rows, features: int) -> np.ndarray:
    """The fraction of rows that have each feature, from a sample of the rows."""
    chosen = sample_rows(rows, SAMPLE)
    if rows.dense:
        return np.ones(features, np.float32)
    return np.divide(count_rows_with(rows, chosen, features), max(1, chosen.size), dtype=np.float32)


@compiled(allocates=True)
def count_rows_with(rows: Rows, chosen: np.ndarray, features: int) -> np.ndarray:
    """The number of chosen rows that have each feature; counts stored zeros, which cost the same."""
    counts = np.zeros(features, np.int32)
    for row in chosen:
        for k in range(rows.begins[row], rows.begins[row + 1]):
            counts[rows.indices[k]] += 1
    return counts
