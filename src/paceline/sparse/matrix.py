"""A view of a user's matrix for the kernels: the same memory, not a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from paceline.sparse.instructions import compiled
from paceline.sparse.rows import Rows

__all__ = ["frequencies", "rows_of", "sample_rows"]

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
