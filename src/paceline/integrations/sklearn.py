"""Linear models trained by Hogwild!, with the conventions and parameters of scikit-learn's `SGDClassifier` and `SGDRegressor`.

Differences from those two:

* `n_jobs` threads share the work of one fit; None means all cores here. Fits too small to be worth a thread use fewer.
* Threads race, so that two fits with one seed differ slightly. `deterministic=True` makes updates in the order of the
  seed, one after the other: the same bits for any `n_jobs`, and no speed-up.
* Several classes are learned in one pass over the data, one against the rest, and stop together.
* Penalties are proximal steps, and L1 is exact: all that is due is applied to each weight.
* `learning_rate` may also be "decay" (times `decay` after every pass, as in the Hogwild! paper) and "adagrad"; `loss`
  may also be a `paceline.sparse.Loss` of one's own. There is no `average`.
* `fit` takes no `coef_init` and `intercept_init`: `warm_start=True` and `partial_fit` continue from coefficients.

Differences from the Hogwild! paper (Niu et al., 2011, arXiv:1106.5730): there, all threads write one vector of weights.
That is `discipline="shared"`. The default, `discipline="copies"`, is not Hogwild! as published: each thread updates its own
weights and periodically merges its changes into the shared ones (`paceline.sparse.hot`). Measured with 2 threads against 1,
on two cores: copies 1.60 and shared 0.81 on text, whose hot words both threads write; 1.69 and 1.15 without hot features.
The losses after as many passes differ by at most 0.0002 (benchmarks/results/sparse.md). With Adagrad, L1 or weights too
large for the caches, and with one thread, both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data

from paceline.errors import UsageError
from paceline.integrations.linear import HogwildLinear, LinearClassifierMixin
from paceline.sparse.losses import CLASSIFICATION, REGRESSION, Loss


@dataclass(kw_only=True, eq=False, repr=False)
class HogwildClassifier(LinearClassifierMixin, ClassifierMixin, HogwildLinear):
    """Linear classifiers (SVM, logistic regression, ...) learned by SGD on all cores, for sparse data.

    In place of `SGDClassifier`, with its parameters and their meanings; the module's text lists what differs. A pass
    costs a few nanoseconds per non-zero. Use when data is sparse and large: text, clicks. Not for small dense data,
    where threads only meet.

    Args:
        loss: "hinge", "log_loss", "squared_hinge", "modified_huber", "perceptron", a loss of `HogwildRegressor`, or a
            `paceline.sparse.Loss`.
        penalty: "l2", "l1", "elasticnet" or None.
        alpha: weight of the penalty.
        l1_ratio: L1's part of elastic net.
        fit_intercept: whether to learn intercepts.
        max_iter: passes at most.
        tol: stop when the loss falls by less than this in `n_iter_no_change` passes; None makes `max_iter` passes.
        shuffle: visit examples in a new order in each pass.
        verbose: print each pass.
        epsilon: width of Huber's and the insensitive losses.
        n_jobs: threads; None and -1 are all cores of this process.
        random_state: seed of the order.
        learning_rate: "optimal", "constant", "invscaling", "adaptive", "decay" or "adagrad".
        eta0: the (first) step.
        power_t: exponent of "invscaling".
        decay: factor of the step after each pass, with "decay".
        early_stopping: stop by the accuracy on a part of the data that is held out.
        validation_fraction: how large that part is.
        n_iter_no_change: how many passes without progress end the fit.
        class_weight: dictionary, or "balanced".
        warm_start: continue from the last fit's coefficients.
        deterministic: the same bits for a seed and any `n_jobs`, without a speed-up.
        discipline: how threads share the weights: "copies", merged now and then; or "shared", one vector that all write, which
            is the Hogwild! paper's.

    Attributes:
        coef_: (1 or classes, features).
        intercept_: one per row of `coef_`.
        classes_: the labels.
        n_iter_: passes made.
        n_threads_: threads used: one for small data.
        passes_: loss, time and staleness of each pass.
    """

    _losses: ClassVar = CLASSIFICATION

    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildClassifier:
        """Learn from X (CSR or dense) and labels.

        Raises:
            UsageError: a parameter is wrong, or there is only one class.
            DivergedError: the steps are too large.
        """
        X, y = self._checked(X, y, reset=True)
        fresh = not (self.warm_start and hasattr(self, "coef_"))
        classes = unique_labels(y)
        if not fresh and not np.array_equal(classes, self.classes_):
            raise UsageError("The labels differ from those of the last fit; use warm_start=False.")
        self.t_ = 1.0
        self._learn_classes(X, y, classes, sample_weight, self.max_iter, fresh, stopping=True)
        self._warn()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> HogwildClassifier:
        """Make one pass over more data; the first call names all classes."""
        fresh = not hasattr(self, "classes_")
        if fresh and classes is None:
            raise UsageError("classes must be passed on the first call to partial_fit.")
        X, y = self._checked(X, y, reset=fresh)
        known = unique_labels(classes) if fresh else self.classes_
        if not fresh and classes is not None and not np.array_equal(unique_labels(classes), known):
            raise UsageError(f"classes={classes!r} is not the same as on the last call to partial_fit: {known!r}.")
        if self.class_weight == "balanced":
            raise UsageError(
                "class_weight 'balanced' is not supported for partial_fit, which does not see all data; compute weights with "
                "compute_class_weight('balanced', classes=classes, y=y) and pass them as a dictionary."
            )
        self._learn_classes(X, y, known, sample_weight, 1, fresh, stopping=False)
        return self

    def _learn_classes(
        self, X: Any, y: Any, classes: np.ndarray, sample_weight: Any, max_iter: int, fresh: bool, stopping: bool
    ) -> None:
        check_classification_targets(y)
        if len(classes) < 2:
            raise UsageError(
                f"Labels of one class only: {classes.tolist()[0]!r}; a classifier needs at least 2, "
                "the number of classes has to be greater than one."
            )
        codes = np.searchsorted(classes, y)
        np.minimum(codes, len(classes) - 1, out=codes)
        if not np.array_equal(classes[codes], y):
            raise UsageError(f"y has labels that are not in classes, which are {classes!r}.")
        emphasis = compute_class_weight(self.class_weight, classes=classes, y=y)
        self.classes_ = classes
        targets = codes.astype(X.dtype)
        del codes  # of the arrays with a number per example, only one is kept while learning
        if len(classes) == 2:
            targets *= 2
            targets -= 1
            balance = emphasis[None, :]
        else:
            balance = np.column_stack([np.ones(len(classes)), emphasis])
        self._learn(
            X, targets, sample_weight, outputs=len(balance), max_iter=max_iter, fresh=fresh, balance=balance,
            stopping=stopping,
        )  # fmt: skip

    def _score(self, X: Any, targets: np.ndarray, weights: np.ndarray | None, chosen: np.ndarray) -> float:
        scores = self._decide(X)
        right = scores.argmax(1) == targets if scores.shape[1] > 1 else (scores[:, 0] > 0) == (targets > 0)
        return float(np.average(right, weights=None if weights is None else weights[chosen]))

    def _has_probabilities(self) -> bool:
        if self.loss not in ("log_loss", "modified_huber"):
            raise AttributeError(f"probability estimates are not available for loss={self.loss!r}")
        return True

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes: the logistic function of the decision, or `modified_huber`'s line; sums are one."""
        check_is_fitted(self)
        scores = self.decision_function(X)
        if self.loss == "log_loss":
            return self._predict_proba_lr(X)
        positive = (np.clip(scores, -1, 1) + 1) / 2
        if positive.ndim == 1:
            return np.column_stack([1 - positive, positive])
        sums = positive.sum(axis=1, keepdims=True)
        positive[sums[:, 0] == 0] = 1
        return positive / positive.sum(axis=1, keepdims=True)

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


@dataclass(kw_only=True, eq=False, repr=False)
class HogwildRegressor(RegressorMixin, HogwildLinear):
    """Linear regression learned by SGD on all cores, for sparse data: in place of `SGDRegressor`, with its parameters.

    Args are `HogwildClassifier`'s but for `class_weight`; `loss` is "squared_error", "huber", "epsilon_insensitive",
    "squared_epsilon_insensitive" or a `paceline.sparse.Loss`. Features and targets should be scaled.
    """

    _losses: ClassVar = REGRESSION

    loss: str | Loss = field(default="squared_error", kw_only=False)
    learning_rate: str = "invscaling"
    power_t: float = 0.25

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildRegressor:
        """Learn from X (CSR or dense) and numbers."""
        X, y = self._checked(X, y, reset=True, y_numeric=True)
        fresh = not (self.warm_start and hasattr(self, "coef_"))
        self.t_ = 1.0
        self._learn(X, y, sample_weight, outputs=1, max_iter=self.max_iter, fresh=fresh)
        self._flatten()
        self._warn()
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildRegressor:
        """Make one pass over more data."""
        fresh = not hasattr(self, "coef_")
        X, y = self._checked(X, y, reset=fresh, y_numeric=True)
        self._learn(X, y, sample_weight, outputs=1, max_iter=1, fresh=fresh, stopping=False)
        self._flatten()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """One number per row."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)
        return safe_sparse_dot(X, self.coef_.T, dense_output=True).ravel() + self.intercept_

    def _flatten(self) -> None:
        self.coef_ = np.ravel(self.coef_)

    def _score(self, X: Any, targets: np.ndarray, weights: np.ndarray | None, chosen: np.ndarray) -> float:
        from sklearn.metrics import r2_score

        emphasis = None if weights is None else weights[chosen]
        return float(r2_score(targets, self._decide(X)[:, 0], sample_weight=emphasis))
