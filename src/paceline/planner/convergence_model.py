"""Hemingway: how the loss falls with the iterations i of m workers, learnt from short runs with a few values of m.

    log(P(i, m) - P*) = g(i, m),    linear in features of i and m, by cross-validated Lasso

The features come from the theory of CoCoA, P(i, m) - P* <= (1 - c0 / m)^i c1, relaxed: algorithms differ in the features
that they use. Interpolation between numbers of workers is good, extrapolation poor. So every model has the error of leaving
out one number of workers, and that of leaving out the later iterations, and every interval is made of them.

Differences to the paper: folds are whole numbers of workers, as neighbours on one curve are redundant; each curve is its
running minimum, since the question is when a loss is first reached; P* may be estimated.

Reference: Pan, Venkataraman, Tai and Gonzalez, "Hemingway: Modeling Distributed Optimization Algorithms", 2017,
    arXiv:1702.05865.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.planner.estimate import Estimate, deviations
from paceline.planner.optimum import estimate_optimum

FEATURES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "i": lambda i, m: i,
    "sqrt i": lambda i, m: np.sqrt(i),
    "log i": lambda i, m: np.log(i),
    "i / m": lambda i, m: i / m,
    "i / m^2": lambda i, m: i / m**2,
    "i / sqrt m": lambda i, m: i / np.sqrt(m),
    "i log m": lambda i, m: i * np.log(m),
    "sqrt(i / m)": lambda i, m: np.sqrt(i / m),
    "sqrt(i) log m": lambda i, m: np.sqrt(i) * np.log(m),
    "log i log m": lambda i, m: np.log(i) * np.log(m),
    "log(i) / m": lambda i, m: np.log(i) / m,
    "log m": lambda i, m: np.log(m),
    "1 / m": lambda i, m: 1 / m,
    "m": lambda i, m: m,
}
_SEEN_FIRST = 0.6  # share of each curve's iterations from which the rest is predicted
_MAX_POINTS = 120  # of one curve
_PENALTIES = np.geomspace(1.0, 1e-5, 20)  # of standardized features and values: the largest removes all features
_HORIZON = 20.0  # times the longest run: no prediction beyond


def thinned(size: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `size` values, the last among them; half of them are denser at the beginning."""
    if size <= most:
        return np.arange(size)
    evenly, early = np.linspace(0, size - 1, most // 2), np.geomspace(1, size, most // 2) - 1
    return np.unique(np.concatenate([evenly, early]).astype(int))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of one run."""

    workers: int  # m, from 1
    iterations: np.ndarray  # (points,) ascending, from 1: updates, rounds or steps, the same for all curves of a model
    losses: np.ndarray  # (points,) after these

    def __post_init__(self) -> None:
        i, losses = np.asarray(self.iterations, float), np.asarray(self.losses, float)
        object.__setattr__(self, "iterations", i)
        object.__setattr__(self, "losses", losses)
        if self.workers < 1:
            raise UsageError(f"A curve needs 1 worker or more, not {self.workers}.")
        if i.ndim != 1 or i.shape != losses.shape or len(i) < 4:
            raise UsageError(f"A curve needs 4 losses or more, each with its iteration, not {i.size}.")
        if i[0] < 1 or np.any(np.diff(i) <= 0) or not np.all(np.isfinite(losses)):
            raise UsageError("A curve's iterations must ascend from 1 or more, and its losses must be finite.")

    def until(self, iteration: float) -> Curve:
        """The beginning of the curve, with at least 4 points."""
        kept = max(4, int(np.searchsorted(self.iterations, iteration, side="right")))
        return Curve(workers=self.workers, iterations=self.iterations[:kept], losses=self.losses[:kept])

    def falling(self) -> Curve:
        """The curve's running minimum, thinned to at most 120 points, half of them denser at the beginning."""
        kept = thinned(len(self.iterations), _MAX_POINTS)
        return Curve(
            workers=self.workers,
            iterations=self.iterations[kept],
            losses=np.minimum.accumulate(self.losses)[kept],
        )


@dataclass(frozen=True, kw_only=True)
class ConvergenceModel:
    """The fitted g, and its error on data that it has not seen; `ConvergenceModel.fit` makes one."""

    optimum: float  # P*
    regressor: Any  # of scikit-learn, from the features to log suboptimality
    residual: float  # root mean square error of log suboptimality over the fitted data
    #: The same for each number of workers, predicted from all others; {} where there was only one.
    leave_one_out: Mapping[int, float]
    forward: float  # the same over the last 40 % of the iterations of all curves, predicted from the first 60 %
    seen: Mapping[int, tuple[float, float]]  # for each number of workers its last iteration and lowest loss
    #: Iteration of the earliest loss. Before it nothing is predicted: features such as log i would go anywhere.
    first: float = 1.0

    @classmethod
    def fit(
        cls, curves: Sequence[Curve], *, optimum: float | None = None, lower_bound: float | None = None
    ) -> ConvergenceModel:
        """Fits to runs with different numbers of workers; several curves of one number are fitted together.

        Takes some tenths of a second for six numbers of workers.

        Args:
            curves: one or more.
            optimum: P*, the least possible loss, where it is known; else it is estimated from all curves, see
                `estimate_optimum`. What is left out or comes later has had its part in that, so the errors are too small.
            lower_bound: what P* cannot be below, as 0 for a cross-entropy.

        Raises:
            UsageError: no curves, or a loss is not above the optimum.
        """
        if not curves:
            raise UsageError("A convergence model needs at least one curve of losses.")
        used = [curve.falling() for curve in curves]
        lowest = min(float(curve.losses[-1]) for curve in used)
        if optimum is None:
            optimum = estimate_optimum([(one.iterations, one.losses) for one in used], lower_bound)
        if not optimum < lowest:
            raise UsageError(f"The optimum {optimum:g} must be below every loss, but {lowest:g} was measured.")
        regressor = _fitted(used, optimum)
        counts = sorted({curve.workers for curve in used})
        left_out = {}
        for m in counts if len(counts) > 1 else []:
            rest = _fitted([one for one in used if one.workers != m], optimum)
            left_out[m] = _rms([_residuals(rest, one, optimum) for one in used if one.workers == m])
        return cls(
            optimum=optimum,
            regressor=regressor,
            residual=_rms([_residuals(regressor, one, optimum) for one in used]),
            leave_one_out=left_out,
            forward=_forward_error(curves, optimum),
            seen={
                m: (
                    max(float(one.iterations[-1]) for one in used if one.workers == m),
                    min(float(one.losses[-1]) for one in used if one.workers == m),
                )
                for m in counts
            },
            first=min(float(curve.iterations[0]) for curve in used),
        )

    @property
    def max_iterations(self) -> float:
        """Nothing is predicted beyond this many iterations: 20 times the longest run."""
        return _HORIZON * max(last for last, _ in self.seen.values())

    def log_suboptimality(self, iterations: np.ndarray | Sequence[float], workers: int) -> np.ndarray:
        """(points,) g(i, m): natural logarithm of the loss above the optimum."""
        return self.regressor.predict(_design(np.asarray(iterations, float), workers))

    def error(self, iterations: np.ndarray | Sequence[float], workers: int) -> np.ndarray:
        """(points,) half the width of the interval of g.

        Within a measured curve it comes from the residuals, beyond its end from `forward`, too, and for a number of workers
        that was not measured from `leave_one_out`: of the numbers between others, if it is between others.
        """
        i, counts = np.asarray(iterations, float), sorted(self.seen)
        within = deviations() * self.residual
        across = deviations(max(1, len(counts) - 1))
        half = np.where(i <= self.seen.get(workers, (math.inf, 0))[0], within, max(within, across * self.forward))
        if workers in self.seen:
            return half
        if not self.leave_one_out:
            return np.full_like(i, math.inf)
        inner = [self.leave_one_out[m] for m in counts[1:-1]] if counts[0] < workers < counts[-1] else []
        left_out = inner or list(self.leave_one_out.values())
        across = deviations(max(1, len(left_out) - 1))
        return np.maximum(half, across * math.sqrt(float(np.mean(np.square(left_out)))))

    def predict(self, iteration: float, workers: int) -> Estimate:
        """The loss after this many iterations of this many workers: the least so far."""
        i = np.geomspace(self.first, max(self.first, iteration), 100)
        g, half = self.log_suboptimality(i, workers).min(), float(self.error([iteration], workers)[0])
        with np.errstate(over="ignore"):
            value, low, high = (self.optimum + float(np.exp(one)) for one in (g, g - half, g + half))
        return Estimate(value=value, low=low, high=high, extrapolated=self.extrapolates(iteration, workers))

    def iterations_to(self, loss: float, workers: int) -> Estimate | None:
        """Iterations until this loss is first reached; None: it is not, within `max_iterations`."""
        if loss <= self.optimum:
            return None
        i = np.geomspace(self.first, self.max_iterations, 600)
        g, half = self.log_suboptimality(i, workers), self.error(i, workers)
        wanted = math.log(loss - self.optimum)
        value, low, high = (_first_below(i, one, wanted) for one in (g, g - half, g + half))  # half may be infinite
        if not math.isfinite(value):
            return None
        outside = loss < min(its for _, its in self.seen.values()) or self.extrapolates(value, workers)
        return Estimate(value=value, low=low, high=high, extrapolated=outside)

    def extrapolates(self, iteration: float, workers: int) -> bool:
        last = self.seen.get(workers, (max(its for its, _ in self.seen.values()), 0.0))[0]
        return not min(self.seen) <= workers <= max(self.seen) or iteration > last * (1 + 1e-9)


def _first_below(i: np.ndarray, g: np.ndarray, wanted: float) -> float:
    """The i at which g first is `wanted` or less, between two points as on a line of g over log i."""
    if not (below := np.flatnonzero(g <= wanted)).size:
        return math.inf
    at = int(below[0])
    if at == 0 or not np.isfinite(g[at]):
        return float(i[at])
    share = (g[at - 1] - wanted) / (g[at - 1] - g[at])
    return float(i[at - 1] * (i[at] / i[at - 1]) ** share)


def _forward_error(curves: Sequence[Curve], optimum: float) -> float:
    begun = [curve.until(_SEEN_FIRST * curve.iterations[-1]).falling() for curve in curves]
    later = [one.falling() for one in curves]
    rest = [(one, one.iterations > first.iterations[-1]) for one, first in zip(later, begun, strict=True)]
    if not any(after.any() for _, after in rest):
        return math.inf
    regressor = _fitted(begun, optimum)
    return _rms([_residuals(regressor, one, optimum)[after] for one, after in rest])


def _design(i: np.ndarray, workers: int) -> np.ndarray:
    m = np.full_like(i, workers)
    return np.stack([feature(i, m) for feature in FEATURES.values()], axis=-1)


def _log_suboptimality(curve: Curve, optimum: float) -> np.ndarray:
    return np.log(curve.losses - optimum)


def _fitted(curves: Sequence[Curve], optimum: float) -> Any:
    """The Lasso of standardized features, whose penalty is the best by cross-validation."""
    from sklearn import config_context
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LassoCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X = np.concatenate([_design(one.iterations, one.workers) for one in curves])
    y = np.concatenate([_log_suboptimality(one, optimum) for one in curves])
    penalties: Any = _PENALTIES  # an array in every version; a number only since 1.7
    lasso = LassoCV(alphas=penalties, cv=_folds(curves), max_iter=1_000, tol=1e-4)
    regressor = TransformedTargetRegressor(make_pipeline(StandardScaler(), lasso), transformer=StandardScaler())
    with warnings.catch_warnings(), config_context(assume_finite=True, skip_parameter_validation=True):
        warnings.simplefilter("ignore", ConvergenceWarning)  # a path that ends early is judged by its error
        return regressor.fit(X, y)


def _residuals(regressor: Any, curve: Curve, optimum: float) -> np.ndarray:
    return _log_suboptimality(curve, optimum) - regressor.predict(_design(curve.iterations, curve.workers))


def _rms(parts: Sequence[np.ndarray]) -> float:
    return math.sqrt(float(np.mean(np.square(np.concatenate(parts)))))


def _folds(curves: Sequence[Curve]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Indices (to fit, to test): leaves out each number of workers once, or, of fewer than three, each third of a curve."""
    m = np.concatenate([np.full(len(one.iterations), one.workers) for one in curves])
    if len(counts := np.unique(m)) < 3:
        m = np.concatenate([np.arange(len(one.iterations)) * 3 // len(one.iterations) for one in curves])
        counts = np.arange(3)
    return [(np.flatnonzero(m != one), np.flatnonzero(m == one)) for one in counts]
