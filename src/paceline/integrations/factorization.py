"""Matrix factorization by Hogwild! with scikit-learn's conventions for transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from paceline.errors import UsageError
from paceline.integrations.linear import check_counts, check_decay
from paceline.sparse.completion import Completion
from paceline.sparse.linear import Pass
from paceline.sparse.rows import rows_of
from paceline.sparse.team import Team, count_threads


@dataclass(kw_only=True, eq=False, repr=False)
class HogwildMatrixFactorization(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Factors of a matrix whose stored entries are known (ratings), learned by SGD on all cores.

    Use in place of NMF or TruncatedSVD if absent entries are unknown rather than zero. In a dense matrix every entry is known.
    Factors may be negative. A pass costs about `n_components` nanoseconds per entry.

    Args:
        n_components: rank.
        alpha: weight of the penalty on squared factors.
        biases: learn a bias of each row and column.
        max_iter: maximum number of passes.
        tol: stop when the root mean squared error falls by less than this fraction of the entries' standard deviation in
            `n_iter_no_change` passes; None makes `max_iter` passes.
        n_iter_no_change: see `tol`.
        eta0: first step.
        decay: factor of the step after each pass.
        init_scale: standard deviation of the first factors.
        n_jobs: threads; None and -1 are all cores of this process.
        random_state: seed of the first factors and of the order.
        deterministic: the same bits for a seed and any `n_jobs`, without a speed-up.

    Attributes:
        components_: (rank, columns).
        row_factors_: (rows, rank) of the fitted matrix, as learned.
        row_biases_: of the fitted matrix.
        column_biases_: one per column.
        mean_: of the entries, with biases.
        reconstruction_err_: root of the mean squared error over the known entries.
        n_iter_: passes made.
        n_threads_: threads used.
        passes_: error, time and staleness of each pass.
    """

    _on_pass: ClassVar[Any] = None  # called with the number of a pass and the pass, for progress on the command line

    n_components: int = field(default=10, kw_only=False)
    alpha: float = 1.0
    biases: bool = True
    max_iter: int = 50
    tol: float | None = 1e-4
    n_iter_no_change: int = 3
    eta0: float = 0.05
    decay: float = 0.95
    init_scale: float = 0.1
    n_jobs: int | None = None
    random_state: Any = None
    deterministic: bool = False

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def fit(self, X: Any, y: Any = None) -> HogwildMatrixFactorization:
        """Learn the factors of X (CSR or dense).

        Raises:
            UsageError: a parameter is wrong.
            DivergedError: the steps are too large.
        """
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], order="C")
        self._check()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        entries = X.nnz if sparse.issparse(X) else X.size
        threads = 1 if self.deterministic else count_threads(self.n_jobs, entries * self.n_components)
        with Team(threads) as team:
            completion = Completion(
                rows_of(X), X.shape[1], self.n_components, alpha=self.alpha, biased=self.biases, team=team, seed=seed,
                spread=self.init_scale,
            )  # fmt: skip
            eta, best, idle = self.eta0, math.inf, 0
            for number in range(1, self.max_iter + 1):
                made = completion.make_pass(eta)
                if self._on_pass is not None:
                    self._on_pass(number, made)
                error = made.loss / completion.unit
                eta *= self.decay
                idle = idle + 1 if self.tol is not None and error > best - self.tol else 0
                best = min(best, error)
                if idle >= self.n_iter_no_change:
                    break
        factors, unit = completion.factors, completion.unit
        self.components_ = factors.columns.T * X.dtype.type(unit)
        self.row_factors_ = factors.rows
        self.row_biases_ = factors.row_biases * X.dtype.type(unit)
        self.column_biases_ = factors.column_biases * X.dtype.type(unit)
        self.mean_, self._unit = completion.centre, unit
        self.passes_: list[Pass] = completion.passes
        self.n_iter_, self.n_threads_ = len(self.passes_), threads
        self.reconstruction_err_ = self.passes_[-1].loss
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> np.ndarray:
        """Learn, and solve for the rows of X."""
        return self.fit(X, **fit_params).transform(X)

    def transform(self, X: Any) -> np.ndarray:
        """Factors of rows, each by least squares against the columns' factors: new rows, too."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], order="C", reset=False)
        columns = self.components_.T.astype(np.float64)
        design = np.column_stack([columns, np.full(len(columns), self._unit)]) if self.biases else columns
        # A row's penalty in the units of the factors; it also makes rows with few entries solvable.
        ridge = max(self.alpha, 1e-6) * self._unit**2 * np.eye(design.shape[1])
        solved = np.zeros((X.shape[0], self.n_components), X.dtype)
        for number in range(X.shape[0]):
            known, values = slice(None), X[number] if not sparse.issparse(X) else None
            if values is None:
                part = slice(X.indptr[number], X.indptr[number + 1])
                known, values = X.indices[part], X.data[part]
            seen = design[known]
            if len(seen):
                residual = values.astype(np.float64) - self.mean_ - self.column_biases_[known]
                solved[number] = np.linalg.solve(seen.T @ seen + ridge, seen.T @ residual)[: self.n_components]
        return solved

    def predict_entries(self, rows: Any, columns: Any) -> np.ndarray:
        """Entries of the fitted matrix at pairs of row and column numbers."""
        check_is_fitted(self)
        rows, columns = np.asarray(rows), np.asarray(columns)
        products = np.einsum("ij,ij->i", self.row_factors_[rows], self.components_.T[columns])
        return self.mean_ + self.row_biases_[rows] + self.column_biases_[columns] + products

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[0]

    def _check(self) -> None:
        check_counts(self, "n_components", "max_iter", "n_iter_no_change")
        for name in ("alpha", "eta0", "init_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (name == "alpha" and value == 0))):
                raise UsageError(f"{name} must be a number above 0, not {value!r}.")
        check_decay(self)
