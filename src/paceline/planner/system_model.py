"""Ernest: how long a step takes with m workers on a part of the data, from a few short measurements.

    f(m, s) = theta_0 + theta_1 s / m + theta_2 log m + theta_3 m,    theta >= 0

The terms are a fixed cost, parallel computation, a tree of messages, and messages to each worker; s is the size of the work
as a share of the full work (data, or a batch). Non-negative coefficients keep extrapolation sensible.

Reference: Venkataraman et al., "Ernest: Efficient Performance Prediction for Large-Scale Advanced Analytics", NSDI 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from paceline.errors import UsageError
from paceline.planner.estimate import Estimate, deviations

FEATURES = ("1", "size / m", "log m", "m")
_RANK = 1e-9  # singular values below this share of the largest count as zero


def system_features(workers: np.ndarray | Sequence[int], sizes: np.ndarray | Sequence[float]) -> np.ndarray:
    """One row (4,) of Ernest's features for each pair of a number of workers and a size: (points, 4)."""
    m, s = np.asarray(workers, float), np.asarray(sizes, float)
    return np.stack([np.ones_like(m), s / m, np.log(m), m], axis=-1)


def _scaled(
    workers: np.ndarray, sizes: np.ndarray, times_s: np.ndarray, *, relative: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weighted features (points, 4) with columns of norm 1, the columns' divisors, and the weights (points,)."""
    weights = 1 / times_s if relative else np.ones_like(times_s)
    A = system_features(workers, sizes) * weights[:, None]
    scale = np.linalg.norm(A, axis=0)
    scale[scale == 0] = 1.0  # log m, if only one worker was measured
    return A / scale, scale, weights


@dataclass(frozen=True, kw_only=True)
class SystemModel:
    """Ernest's fitted model of times; `SystemModel.fit` makes one."""

    theta: np.ndarray  # (4,) coefficients of `FEATURES`, in seconds, none below zero
    workers: np.ndarray
    sizes: np.ndarray
    times_s: np.ndarray
    relative: bool = False  # whether errors are relative to the times

    @classmethod
    def fit(
        cls,
        workers: Sequence[int] | np.ndarray,  # (points,) numbers of workers, each 1 or more; repeats are useful
        times_s: Sequence[float] | np.ndarray,  # (points,) seconds, above 0
        sizes: Sequence[float] | np.ndarray | None = None,  # (points,) sizes, above 0; None: all 1
        *,
        # Minimise relative errors, not seconds as in the paper. Right if a long step varies by more seconds than a
        # short one, as steps do.
        relative: bool = False,
    ) -> SystemModel:
        """Fits by non-negative least squares.

        Raises:
            UsageError: the measurements are missing, or cannot be times of workers.
        """
        m = np.asarray(workers, float)
        s = np.ones_like(m) if sizes is None else np.asarray(sizes, float)
        times = np.asarray(times_s, float)
        if not m.size or m.shape != s.shape or m.shape != times.shape or m.ndim != 1:
            raise UsageError(
                "A system model needs one time and one size for each number of workers, and at least one number of workers."
            )
        if not (np.all(m >= 1) and np.all(np.isfinite(m))):
            raise UsageError("A system model's numbers of workers must be 1 or more.")
        if not all(np.all(one > 0) and np.all(np.isfinite(one)) for one in (s, times)):
            raise UsageError("A system model's times and sizes must be numbers above 0.")
        A, scale, weights = _scaled(m, s, times, relative=relative)
        theta, _ = nnls(A, times * weights)
        return cls(theta=theta / scale, workers=m, sizes=s, times_s=times, relative=relative)

    def predict(self, workers: int, size: float = 1.0) -> Estimate:
        """Predicted seconds of one more step, with the interval of a single measurement.

        The interval is that of unconstrained least squares, which is rather too wide. It is unbounded if there are no more
        measurements than coefficients, or if the point is no combination of the measured ones (3 workers, from 1 and 2).

        Args:
            workers: m, from 1.
            size: s, above 0.
        """
        row = system_features([workers], [size])[0]
        value = float(row @ self.theta)
        half = self._half_width(row, value)
        outside = any(
            not seen.min() <= asked <= seen.max() for asked, seen in ((workers, self.workers), (size, self.sizes))
        )
        return Estimate(value=value, low=max(0.0, value - half), high=value + half, extrapolated=outside)

    def _half_width(self, row: np.ndarray, value: float) -> float:
        A, scale, weights = _scaled(self.workers, self.sizes, self.times_s, relative=self.relative)
        _, singular, Vt = np.linalg.svd(A, full_matrices=False)
        kept = singular > _RANK * singular[0]
        freedom = len(self.times_s) - int(kept.sum())
        asked = row / scale
        along = Vt @ asked
        if freedom < 1 or asked @ asked - along[kept] @ along[kept] > _RANK * asked @ asked:
            return math.inf
        residuals = self.times_s * weights - A @ (self.theta * scale)
        variance = float(residuals @ residuals) / freedom
        noise = (value if self.relative else 1.0) ** 2
        spread = noise + float(np.sum((along[kept] / singular[kept]) ** 2))
        return deviations(freedom) * math.sqrt(variance * spread)
