"""Gradient and noise from the norms of small and large batches: the two estimates whose ratio is the noise scale.

A batch of B samples has a gradient with E|g_B|^2 = |G|^2 + tr(Sigma) / B: two batch sizes determine both terms.

Reference: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

import numpy as np

__all__ = ["gradient_and_noise"]


def gradient_and_noise(
    small: np.ndarray, big: np.ndarray, small_batch: float, big_batch: float
) -> tuple[np.ndarray, np.ndarray]:
    """|G|^2 and tr(Sigma), unbiased, of each step (steps,); the first may be negative if noise hides the gradient.

    >>> gradient_and_noise(np.array([3.0]), np.array([1.5]), 1, 4)
    (array([1.]), array([2.]))

    Args:
        small: (steps,) squared norms of gradients of `small_batch` samples.
        big: (steps,) squared norms of gradients of `big_batch` samples.
        small_batch: samples, fewer than `big_batch`.
        big_batch: samples.
    """
    squared = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return squared, (small - big) / (1 / small_batch - 1 / big_batch)
