"""Data of RCV1's shape, for benchmarks: text as sparse rows, made from a seed."""

from __future__ import annotations

import numpy as np
from scipy import sparse

FEATURES, NONZEROS = 47_236, 76


def rcv1_like(rows: int, *, skewed: bool = True, seed: int = 0, dtype: type = np.float32) -> tuple:
    """Text-like data of RCV1's shape, with noisy labels.

    Log TF-IDF of words by Zipf's law, or all equally frequent; rows have length 1.
    """
    random = np.random.default_rng(seed)
    lengths = random.poisson(NONZEROS, rows).clip(8)
    if skewed:
        chances = 1 / (np.arange(FEATURES) + 6.0)
        words = np.searchsorted(np.cumsum(chances / chances.sum()), random.random(lengths.sum())).clip(max=FEATURES - 1)
        words = random.permutation(FEATURES)[words]
    else:
        words = random.integers(0, FEATURES, lengths.sum())
    matrix = sparse.csr_matrix((np.ones(lengths.sum()), (np.repeat(np.arange(rows), lengths), words)), (rows, FEATURES))
    matrix.sum_duplicates()
    documents = np.bincount(matrix.indices, minlength=FEATURES)
    matrix.data = (1 + np.log(matrix.data)) * np.log(1.01 * rows / np.maximum(documents, 1))[matrix.indices]
    norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1)).ravel())
    matrix.data /= np.repeat(norms, np.diff(matrix.indptr))
    scores = matrix @ random.standard_normal(FEATURES)
    labels = np.sign(scores + 0.3 * scores.std() * random.standard_normal(rows))
    return matrix.astype(dtype), labels.astype(dtype)


def split(rows: int, **how: object) -> tuple:
    """Training part, its labels, test part (a tenth more), its labels."""
    X, y = rcv1_like(rows + rows // 10, **how)
    return X[:rows], y[:rows].copy(), X[rows:], y[rows:].copy()
