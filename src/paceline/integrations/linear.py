"""The common part of Hogwild!'s linear estimators: scikit-learn's parameters, and one model trained in passes."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning

# Private in scikit-learn, and used in no other file: there is no public base with `densify` or `decision_function`, and no
# public check of samples' weights.
from sklearn.linear_model._base import LinearClassifierMixin as LinearClassifierMixin
from sklearn.linear_model._base import SparseCoefMixin
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from sklearn.utils import check_random_state
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, validate_data

from paceline.errors import UsageError
from paceline.sparse.linear import LinearModel, Pass
from paceline.sparse.losses import Loss
from paceline.sparse.options import plan_for
from paceline.sparse.rows import rows_of
from paceline.sparse.steps import PassPlan
from paceline.sparse.team import Team, count_threads


def check_counts(estimator: Any, *names: str) -> None:
    """Rejects parameters that are not positive integers."""
    for name in names:
        value = getattr(estimator, name)
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be a whole number, 1 or more, not {value!r}.")


def check_decay(estimator: Any) -> None:
    """Rejects a decay factor outside (0, 1]."""
    if not 0 < estimator.decay <= 1:
        raise UsageError(f"decay must be above 0 and up to 1, not {estimator.decay!r}.")


@dataclass(kw_only=True, eq=False, repr=False)
class HogwildLinear(SparseCoefMixin, BaseEstimator, ABC):
    """Base of classifier and regressor: their parameters, one model, passes until the loss stops falling.

    scikit-learn reads the parameters from the signature of `__init__`, which the dataclass generates.
    """

    _losses: ClassVar[tuple[str, ...]]
    _on_pass: ClassVar[Any] = None  # called with the number of a pass and the pass, for progress on the command line

    loss: str | Loss = field(default="hinge", kw_only=False)
    penalty: str | None = "l2"
    alpha: float = 0.0001
    l1_ratio: float = 0.15
    fit_intercept: bool = True
    max_iter: int = 1000
    tol: float | None = 1e-3
    shuffle: bool = True
    verbose: int = 0
    epsilon: float = 0.1
    n_jobs: int | None = None
    random_state: Any = None
    learning_rate: str = "optimal"
    eta0: float = 0.01
    power_t: float = 0.5
    decay: float = 0.9
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 5
    warm_start: bool = False
    deterministic: bool = False
    discipline: str = "copies"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _check_numbers(self) -> None:
        check_counts(self, "max_iter", "n_iter_no_change")
        check_decay(self)
        if not 0 < self.validation_fraction < 1:
            raise UsageError(f"validation_fraction must be between 0 and 1, not {self.validation_fraction!r}.")

    def _checked(self, X: Any, y: Any, *, reset: bool, **more: Any) -> Any:
        return validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], order="C", reset=reset, **more
        )

    def plan(self, *, dense: bool, tracking: bool) -> PassPlan:
        """The parameters, checked, in the form that the kernels take."""
        names = ("loss", "penalty", "alpha", "l1_ratio", "learning_rate", "eta0", "power_t", "epsilon", "fit_intercept")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return plan_for(**given, allowed=self._losses, dense=dense, tracking=tracking)

    def _learn(
        self,
        X: Any,
        targets: np.ndarray,
        sample_weight: Any,
        *,
        outputs: int,
        max_iter: int,
        fresh: bool,
        balance: np.ndarray | None = None,
        stopping: bool = True,
    ) -> None:
        """Makes passes from the current coefficients, or from zero if `fresh`."""
        self._check_numbers()
        if self.early_stopping and not stopping:
            raise UsageError(
                "early_stopping should be False with partial_fit, which is one pass over a part of the data."
            )
        dense = isinstance(X, np.ndarray)
        watching = stopping and (self.tol is not None or self.early_stopping or bool(self.verbose))
        plan = self.plan(dense=dense, tracking=watching or self.learning_rate == "adaptive")
        threads = count_threads(self.n_jobs, X.size if dense else X.nnz)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
        random = check_random_state(self.random_state)
        seed = int(random.randint(np.iinfo(np.int32).max)) if self.shuffle else None
        subset = validation = None
        if self.early_stopping and stopping:
            subset, validation = self._split(targets, random)
            if weights is not None and not weights[validation].any():
                raise UsageError(
                    "All examples that early_stopping holds out have weight 0 and cannot measure the fit: remove "
                    "examples of weight 0, or hold out more with validation_fraction."
                )
        model = self._model(X.shape[1], outputs, X.dtype, fresh)
        with Team(1 if self.deterministic else threads) as team:
            learning = model.learn(
                rows_of(X),
                targets.astype(X.dtype, copy=False),
                plan,
                team,
                loss=self.loss if isinstance(self.loss, Loss) else None,
                weights=weights,
                balance=balance,
                subset=subset,
                seed=seed,
                discipline=self.discipline,
            )
            eta, best, idle = plan.eta, math.inf, 0
            for number in range(1, max_iter + 1):
                made = learning.make_pass(eta=eta)
                if self._on_pass is not None:
                    self._on_pass(number, made)
                if self.verbose:
                    print(f"Pass {number}: mean loss {made.loss:.6f}, {made.seconds:.3f} s")
                if self.learning_rate == "decay":
                    eta *= self.decay
                if not watching and self.learning_rate != "adaptive":
                    continue
                worse = made.loss
                if validation is not None:
                    learning.settle()
                    self._take(model)
                    worse = -self._score(X[validation], targets[validation], weights, validation)
                idle = idle + 1 if self.tol is not None and worse > best - self.tol else 0
                best = min(best, worse)
                if idle >= self.n_iter_no_change:
                    if self.learning_rate != "adaptive" or eta <= 1e-6:
                        break
                    eta, idle = eta / 5, 0
            learning.settle()
        self._take(model)
        self._squares = model.squares
        self.n_iter_ = len(learning.passes)
        self.t_ = float(model.steps + 1)
        self.n_threads_ = team.threads
        self.discipline_ = learning.discipline
        self.passes_: list[Pass] = learning.passes

    def _model(self, features: int, outputs: int, dtype: np.dtype, fresh: bool) -> LinearModel:
        model = LinearModel(features, outputs, dtype)
        if not fresh:
            coefficients: Any = self.coef_
            coefficients = coefficients.toarray() if issparse(coefficients) else np.atleast_2d(coefficients)
            if coefficients.shape != (outputs, features):
                raise UsageError(
                    f"The data has {features} features for {outputs} outputs, but the earlier fit's coefficients are "
                    f"for {coefficients.shape[1]} and {coefficients.shape[0]}; use warm_start=False."
                )
            model.coordinates[:] = coefficients.T
            model.intercepts[:] = self.intercept_
            model.steps = int(getattr(self, "t_", 1.0)) - 1
            model.squares = getattr(self, "_squares", model.squares).astype(dtype)
        return model

    def _take(self, model: LinearModel) -> None:
        self.coef_ = model.coordinates.T
        self.intercept_ = model.intercepts.astype(model.dtype)

    def _warn(self) -> None:
        message = ""
        if self.passes_[-1].limited:
            message = "The fit diverged: slopes had to be limited. Scale the data, or make eta0 smaller."
        elif self.tol is not None and self.n_iter_ == self.max_iter:
            message = "Maximum number of iterations reached before convergence; consider a larger max_iter."
        if message:
            warnings.warn(message, ConvergenceWarning, stacklevel=3)

    def _split(self, targets: np.ndarray, random: Any) -> tuple[np.ndarray, np.ndarray]:
        kind = StratifiedShuffleSplit if isinstance(self, ClassifierMixin) else ShuffleSplit
        split = kind(1, test_size=self.validation_fraction, random_state=random)
        try:
            subset, validation = next(split.split(np.zeros((len(targets), 1)), targets))
        except ValueError as error:
            raise UsageError(f"Too little data to hold out a part for early_stopping: {error}") from error
        return np.sort(subset), np.sort(validation)

    @abstractmethod
    def _score(self, X: Any, targets: np.ndarray, weights: np.ndarray | None, chosen: np.ndarray) -> float:
        """The current coefficients' score on held-out rows; higher is better."""

    def _decide(self, X: Any) -> np.ndarray:
        return safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
