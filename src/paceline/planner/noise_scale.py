"""How large a batch is worth its samples: the gradient noise scale, from norms that data-parallel training has at hand.

A batch of B samples has a gradient whose squared norm is E|g_B|^2 = |G|^2 + tr(Sigma) / B: that of the true gradient, and the
noise of single samples, shared. With n workers every step shows two points of this line: each worker's own gradient, of b
samples, and their mean, of n b. The noise scale tr(Sigma) / |G|^2 is the batch at which noise and gradient are equal: smaller
ones need proportionally more steps, larger ones waste samples.

Reference: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import UsageError
from paceline.planner.estimate import Estimate, deviations
from paceline.planner.noise_norms import gradient_and_noise

__all__ = ["NoiseScale", "noise_scale", "squared_norms"]

_MAX_GROUPS = 20


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The noise scale, and what a batch costs by it.

    >>> scale = NoiseScale(squared_gradient=2.0, trace=200.0, batch_size=Estimate(value=100.0, low=80.0, high=125.0))
    >>> scale.steps_factor(100), scale.examples_factor(100), scale.examples_factor(10)
    (2.0, 2.0, 1.1)

    Attributes:
        squared_gradient: unbiased estimate of |G|^2; may be negative where noise hides the gradient.
        trace: unbiased estimate of tr(Sigma), the variance of one sample's gradient.
        batch_size: their ratio, in samples; infinite where |G|^2 is not told from zero.
    """

    squared_gradient: float
    trace: float
    batch_size: Estimate

    def steps_factor(self, batch_size: float) -> float:
        """Steps needed with this batch over those with the whole data: 1 + scale / batch."""
        return 1 + self.batch_size.value / batch_size

    def examples_factor(self, batch_size: float) -> float:
        """Samples needed with this batch over those with a batch of 1 or less: 1 + batch / scale; infinite without noise."""
        return 1 + batch_size / self.batch_size.value if self.batch_size.value else math.inf


def squared_norms(gradients: np.ndarray) -> tuple[float, float]:
    """Mean of the workers' squared gradient norms, and squared norm of their mean, for one step.

    Args:
        gradients: (workers, parameters), each of an equally large batch.
    """
    return float(np.mean(np.sum(gradients**2, axis=1))), float(np.sum(gradients.mean(axis=0) ** 2))


def noise_scale(
    small: Sequence[float] | np.ndarray, big: Sequence[float] | np.ndarray, *, small_batch: float, big_batch: float
) -> NoiseScale:
    """The noise scale of some steps, during which it should not change much.

    Both |G|^2 and tr(Sigma) are unbiased for any number of steps; their ratio is only nearly so, and has Fieller's
    interval, from the means of up to 20 groups of neighbouring steps.

    Args:
        small: (steps,) squared norms of gradients of `small_batch` samples; with several workers the mean over them.
        big: (steps,) squared norms of gradients of `big_batch` samples, at the same parameters.
        small_batch: samples of one worker's batch.
        big_batch: samples of all workers' batches together.

    Raises:
        UsageError: fewer than two steps, or batches of one size.
    """
    few, many = np.asarray(small, float), np.asarray(big, float)
    if few.ndim != 1 or few.shape != many.shape or len(few) < 2:
        raise UsageError("A noise scale needs both squared norms of two steps or more.")
    if not 0 < small_batch < big_batch:
        raise UsageError(
            f"A noise scale needs gradients of two batch sizes, the small one first, not {small_batch:g} and"
            f" {big_batch:g}: with one worker there is only one."
        )
    squared, trace = gradient_and_noise(few, many, small_batch, big_batch)
    return NoiseScale(
        squared_gradient=float(squared.mean()), trace=float(trace.mean()), batch_size=_ratio(trace, squared)
    )


def _ratio(trace: np.ndarray, squared: np.ndarray) -> Estimate:
    """Of their means, with Fieller's interval: all r for which the mean of trace - r squared is not clearly other than 0."""
    groups = min(_MAX_GROUPS, len(trace))
    parts = np.array_split(np.arange(len(trace)), groups)
    means = np.array([[of[part].mean() for part in parts] for of in (trace, squared)])
    (T, Q), V = (float(trace.mean()), float(squared.mean())), np.cov(means) / groups
    t2 = deviations(groups - 1) ** 2
    a, b, c = Q**2 - t2 * V[1, 1], T * Q - t2 * V[0, 1], T**2 - t2 * V[0, 0]  # a r^2 - 2 b r + c <= 0
    value = max(0.0, T / Q) if Q > 0 else math.inf
    if a > 0 and Q > 0:
        half = math.sqrt(max(0.0, b * b - a * c)) / a
        return Estimate(value=value, low=max(0.0, b / a - half), high=max(0.0, b / a + half))
    low = 0.0
    if a < 0 < c:  # one root on each side of 0: r is above the positive one
        low = (b - math.sqrt(b * b - a * c)) / a
    return Estimate(value=value, low=low, high=math.inf)
