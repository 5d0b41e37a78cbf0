"""DQ-SGD's rule: how many bits each step's gradient is worth. Pure functions of numbers.

Rounding to s levels on each side adds at most m_t / (4 s^2) to the squared error of step t, where m_t is the gradient's size
(`QSGD.error_bound`: d times the square norm with the paper's one scale). That counts alpha^(T - t) at the end of T steps, as
the later ones shrink it. Least bits for a given sum of errors, where s is large: all steps' errors count the same,

    s_t = K alpha^((T - t) / 2) sqrt(m_t),    B_t = log2(s_t + 1) + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BudgetRule", "bits_of", "factor_for_budget", "factor_for_error", "total_error"]

_WITHIN = 20.0  # steps, about, in which a bit too much is made up for
_MOST = 2.0  # bits by which a step makes up for others


def bits_of(log2_levels: float) -> float:
    """B, not rounded, of s levels on each side, given as log2(s).

    >>> bits_of(math.log2(7))
    4.0
    """
    return log2_levels + 1 if log2_levels > 50 else math.log2(2.0**log2_levels + 1) + 1


def factor_for_error(target_error: float) -> float:
    """log2(K) with which every step's weighted error is at most that: m_t alpha^(T - t) / (4 s_t^2).

    >>> factor_for_error(0.25)
    0.0
    """
    return -0.5 * math.log2(4 * target_error)


def factor_for_budget(log2_sizes: Sequence[float], target_bits: float) -> float:
    """log2(K) with which the mean of B_t is the target.

    Args:
        log2_sizes: log2(alpha^((T - t) / 2) sqrt(m_t)) of every step.
        target_bits: above 1.
    """
    middle = target_bits - 1 - sum(log2_sizes) / len(log2_sizes)
    low, high = middle - 60.0, middle + 1.0
    for _ in range(80):
        factor = (low + high) / 2
        if sum(bits_of(factor + size) for size in log2_sizes) > target_bits * len(log2_sizes):
            high = factor
        else:
            low = factor
    return (low + high) / 2


def total_error(log2_sizes: Sequence[float], log2_levels: Sequence[float]) -> float:
    """The sum of weighted error bounds of steps rounded to so many levels."""
    return sum(4.0 ** (size - levels) / 4 for size, levels in zip(log2_sizes, log2_levels, strict=True))


class BudgetRule:
    """Whole bits, step by step, whose mean keeps to a budget.

    What later gradients will be like is not known: K is what makes the steps so far take the budget, by the rule where s is
    large, so that a step gets more bits than the target where its gradient is larger than most so far. Where sizes keep rising
    or falling, what was spent too much or too little is made up for. Bits are rounded so that their sum follows the rule's.

    Args:
        target_bits: mean per element.
        least: bits of a step.
        most: bits of a step.
    """

    def __init__(self, target_bits: float, least: int, most: int) -> None:
        self._target, self._least, self._most = target_bits, least, most
        self.count = 0
        self.mean = 0.0  # of log2 sizes
        self.saved = 0.0  # bits that the steps so far have left of their budget
        self.owed = 0.0  # bits by which the sum of whole ones is behind the rule's

    def next(self, log2_size: float) -> int:
        """Bits of a step whose gradient is so large."""
        self.count += 1
        self.mean += (log2_size - self.mean) / self.count
        made_up = max(-_MOST, min(_MOST, self.saved / _WITHIN))
        wanted = self._target + (log2_size - self.mean) + made_up
        wanted = min(float(self._most), max(float(self._least), wanted)) + self.owed
        bits = min(self._most, max(self._least, round(wanted)))
        self.owed = max(-1.0, min(1.0, wanted - bits))
        self.saved += self._target - bits
        return bits
