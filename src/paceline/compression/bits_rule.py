"""DQ-SGD's rule: how many bits each step's gradient gets.

Rounding to s levels on each side adds at most m / (4 s^2) to a step's squared error, where m is the size of the rounded
vector (`QSGD.error_bound`: d times the square norm with the paper's one scale). At the end of T steps, alpha^(T - t) of it
remains. For a given sum of errors, the number of levels with the fewest bits is proportional to alpha^((T - t) / 2) sqrt(m).
Logarithms and powers are decimal, so that they are equal on all processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal

_HALF_OVER_LN_2 = 0.7213475204444817
_DIGITS = Context(prec=20)
_MARGIN = 0.02  # tolerance of the bit budget, and of the sum of errors with saved bits
_NEWEST = 0.3  # weight of the newest size in the size expected next
_STEPS = 20  # before a trend of sizes counts, and between two saved bits that steps of usual size spend


def error_of(bits: int) -> float:
    """The bound for a gradient of size 1.

    >>> error_of(3)
    0.027777777777777776
    """
    return 0.25 / (2 ** (bits - 1) - 1) ** 2


def half_log2(size: float) -> float:
    """log2(sqrt(size))."""
    return float(Decimal(size).ln(_DIGITS)) * _HALF_OVER_LN_2


def power(base: float, exponent: float) -> float:
    """base^exponent."""
    return float(_DIGITS.power(Decimal(base), Decimal(exponent)))


@dataclass
class History:
    """The state of a `Budget`, for checkpoints."""

    steps: int = 0
    planned: float = 0.0  # sum of planned bits
    owed: float = 0.0  # planned bits lost to rounding
    saved: int = 0  # bits saved on small gradients for large ones
    error: float = 0.0  # sum of error bounds, and what it is with the planned bits
    planned_error: float = 0.0
    size: float = 0.0  # the newest
    expected: float = 0.0  # weighted log2 of the next norm
    count: int = 0  # of the weighted log2 norms: number, mean, and sums of the regression line through them
    mean: float = 0.0
    squares: float = 0.0
    products: float = 0.0


class Budget:
    """Chooses whole bits for each step so that their mean keeps to a budget.

    The plan is `target_bits` in each step. With alpha below 1 it rises with the steps' weights, by as much as weighted norms
    have risen so far. A norm below half of their geometric mean saves one bit, as long as the sum of errors stays within 2 %
    of the plan's; a norm above twice the mean spends a saved bit, and so does every 20th step in between.

    Args:
        target_bits: mean per element.
        alpha: share of a step's error that remains after a step.
        total_steps: T, for alpha below 1.
    """

    def __init__(
        self, target_bits: float, least: int = 2, most: int = 8, alpha: float = 1.0, total_steps: int | None = None
    ) -> None:
        self._target, self._least, self._most, self._alpha = target_bits, least, most, alpha
        self._total = total_steps or 0
        self._rise = -half_log2(alpha)  # of log2 of a step's weight over that of the one before
        self.history = History()

    def _plan(self) -> tuple[float, int]:
        """Bits of the present step, and the whole number for them."""
        history, left = self.history, self._total - self.history.steps
        if not self._rise or left <= 0:
            return self._target, round(self._within(self._target + min(1.0, max(-1.0, history.owed))))
        rise = 0.0
        if history.count >= _STEPS:
            rise = min(self._rise, max(0.0, history.products / history.squares))
        mean = self._within((self._target * self._total - history.planned) / left)
        levels = (power(2, mean - 1) - 1) * power(2, -rise * (left - 1) / 2)
        planned = self._within(2 * half_log2(levels + 1) + 1)
        whole = round(planned)
        owed = history.owed + planned - whole
        if abs(owed) > _MARGIN * self._target * self._total:
            whole = int(self._within(whole + math.copysign(1, owed)))
        return planned, whole

    def _within(self, bits: float) -> float:
        return min(float(self._most), max(float(self._least), bits))

    def choose(self, size: float = math.nan) -> int:
        """The present step's bits, for the `size` of its gradient; NaN: unknown."""
        history, (planned, bits) = self.history, self._plan()
        if not history.count:
            return bits
        expected = history.expected
        if 0 < size < math.inf:
            expected = half_log2(size) + self._rise * history.steps
        else:
            size = history.size
        above = expected - history.mean
        if history.saved and bits < self._most and (above > 1 or (above >= -1 and history.steps % _STEPS == 0)):
            return bits + 1
        unspent = history.saved + max(0.0, history.owed + planned - bits)
        if above < -1 and bits > self._least and unspent + 1 < _MARGIN * (history.planned + planned):
            error, planned_error = self._errors(size, bits - 1, bits)
            if error <= (1 + _MARGIN) * planned_error:
                return bits - 1
        return bits

    def _errors(self, size: float, bits: int, planned: int) -> tuple[float, float]:
        history = self.history
        error = history.error * self._alpha + size * error_of(bits)
        return error, history.planned_error * self._alpha + size * error_of(planned)

    def account(self, size: float, bits: int) -> None:
        """Records the present step's bits and the size of its gradient; a size of 0 or one that is not finite is unknown."""
        history, (planned, whole) = self.history, self._plan()
        if 0 < size < math.inf:
            history.error, history.planned_error = self._errors(size, bits, whole)
            log2 = half_log2(size) + self._rise * history.steps
            history.expected += (_NEWEST if history.count else 1.0) * (log2 - history.expected)
            above, history.size = log2 - history.mean, size
            history.count += 1
            history.mean += above / history.count
            history.squares += (history.count**2 - history.count) / 4
            history.products += above * (history.count - 1) / 2
        history.steps += 1
        history.planned += planned
        history.owed += planned - whole
        history.saved += whole - bits
