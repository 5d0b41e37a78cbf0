"""DQ-SGD's rule: how many bits each step's gradient is worth. Pure functions of numbers, and the rule under way.

Rounding to s levels on each side adds at most m_t / (4 s^2) to the squared error of step t, where m_t is the size of what is
rounded (`QSGD.error_bound`: d times the square norm with the paper's one scale). That counts alpha^(T - t) at the end of T
steps, as the later ones shrink it. Least bits for a given sum of errors, where s is large: all steps' errors count the same,

    s_t = K alpha^((T - t) / 2) sqrt(m_t),    B_t = log2(s_t + 1) + 1.

Bits are whole: B_t is rounded to the nearest, and K is what makes the rounded bits keep to the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal

__all__ = [
    "Budget",
    "History",
    "bits_of",
    "error_of",
    "factor_for_budget",
    "half_log2",
    "power",
    "total_error",
    "whole_bits",
]

_RAMP = 0.1  # log2 levels on each side of a change of the rounded bits in which they lie between
_CHANGES = [
    round(math.log2(2.0 ** (bits - 1.5) - 1), 9) for bits in range(3, 9)
]  # log2 levels from which they are `bits`
_HALF_OVER_LN_2 = 0.7213475204444817
_DIGITS = Context(prec=20)


def bits_of(log2_levels: float) -> float:
    """B, not rounded, of s levels on each side, given as log2(s).

    >>> bits_of(math.log2(7))
    4.0
    """
    return log2_levels + 1 if log2_levels > 50 else math.log2(2.0**log2_levels + 1) + 1


def whole_bits(log2_levels: float, least: int = 2, most: int = 8) -> float:
    """`bits_of`, rounded to the nearest whole number from `least` to `most`; in between only where that changes.

    The mean of steps that are all alike can be no whole number: then K lies in such a ramp, and bits alternate. Elsewhere a
    number between two would cost more: half of the steps with a bit less make a larger error than the others save.

    >>> whole_bits(math.log2(7)), round(whole_bits(2.2194), 1)
    (4.0, 3.5)
    """
    bits = float(least)
    for change in _CHANGES[least - 2 : most - 2]:
        bits += min(1.0, max(0.0, 0.5 + (log2_levels - change) / (2 * _RAMP)))
    return bits


def factor_for_budget(
    log2_sizes: Sequence[float], target_bits: float, bits: Callable[[float], float] = bits_of
) -> float:
    """log2(K) with which the mean of B_t is the target; where several are, that in their middle.

    Args:
        log2_sizes: log2(alpha^((T - t) / 2) sqrt(m_t)) of every step.
        target_bits: above 1.
        bits: of levels.
    """

    def border(excess: float) -> float:
        low, high = -64.0 - max(log2_sizes), 64.0 - min(log2_sizes)
        for _ in range(50):
            factor = (low + high) / 2
            if sum(bits(factor + size) for size in log2_sizes) > (target_bits + excess) * len(log2_sizes):
                high = factor
            else:
                low = factor
        return (low + high) / 2

    return (border(-1e-9) + border(1e-9)) / 2


def error_of(bits: float) -> float:
    """The bound of a gradient of size 1; between whole numbers, of bits that alternate.

    >>> error_of(3), error_of(2.5) == (error_of(2) + error_of(3)) / 2
    (0.027777777777777776, True)
    """
    below = math.floor(bits)
    error, share = 0.25 / (2 ** (below - 1) - 1) ** 2, bits - below
    return error if not share else error + share * (0.25 / (2**below - 1) ** 2 - error)


def total_error(log2_sizes: Sequence[float], log2_levels: Sequence[float]) -> float:
    """The sum of weighted error bounds of steps rounded to so many levels."""
    return sum(4.0 ** (size - levels) / 4 for size, levels in zip(log2_sizes, log2_levels, strict=True))


def half_log2(size: float) -> float:
    """log2(sqrt(m)), in decimal arithmetic: equal on all processors, whose own logarithms may differ in the last bit."""
    return float(Decimal(size).ln(_DIGITS)) * _HALF_OVER_LN_2


def power(base: float, exponent: int) -> float:
    """base^exponent, equal on all processors, too."""
    return float(_DIGITS.power(Decimal(base), exponent))


_EVERY = 10  # steps between two solutions
_POINTS = 16  # steps that stand for all that are left
_PAYS_BACK = (
    50.0  # steps, at least, in which a debt is paid back: a last step with two bits would cost more than the debt
)
_DEBT = 0.016  # that the bits may be off the budget, as a share of it
_WORSE = 0.02  # that a sum of errors may be above that of the planned bits
_FOLLOWS = (1.0, 0.3, 0.1)  # shares of the newest size in what is expected of the next
_SEEN = 20  # sizes that a line is drawn through; until then they are expected to fall as fast as their weights rise
_RETURNS = 4  # crossings of the mean after which sizes are expected to go on crossing it
_SPREAD = (-1.342, -0.447, 0.447, 1.342)  # deviations that stand for all


@dataclass
class History:
    """What a `Budget` remembers: everything that a checkpoint needs."""

    steps: int = 0
    debt: float = 0.0  # bits spent above the planned ones
    owed: float = 0.0  # bits by which whole numbers are behind the rule's
    factor: float = 0.0  # log2(K) and the plan's at the step `due`, when they are solved again
    level: float = 0.0
    due: int = 0
    drift: float = 0.0  # by which a step's weighted size is expected to be above that of the one before, as log2
    planned: float = 0.0  # bits of the present step, and of those before it
    planned_bits: float = 0.0
    error: float = 0.0  # the sum of bounds so far, and what it is with the planned bits
    planned_error: float = 0.0
    size: float = 0.0  # the newest, and the largest
    largest: float = 0.0
    expected: list[float] = field(default_factory=list)  # of the next log2 size, by each of `_FOLLOWS`; and how wrong
    wrong: list[float] = field(default_factory=lambda: [0.0] * len(_FOLLOWS))
    count: int = 0  # of the log2 sizes that bits were chosen for: their number, mean and squared deviations
    mean: float = 0.0
    squares: float = 0.0
    times: float = 0.0  # the squared deviations of their steps, and these times their own: a line through them
    slopes: float = 0.0
    side: int = 0  # of the mean on which they were last; how often they have crossed it, and when they last did
    crossings: int = 0
    crossed: int = 0
    log2: float = math.nan  # of the size that the present step's bits are chosen for, and the rule's bits
    wish: float = 0.0


class Budget:
    """Whole bits, step by step, whose mean keeps to a budget.

    K is solved again every ten steps, over the steps and the bits that are left. Sizes that have crossed their mean again and
    again are expected to go on deviating from it as they have; else all steps left are expected to be as large as the present
    one. A rise or fall is not expected to go on: if it ends, as a warm-up does, that costs more than one that goes on saves.
    Only where alpha is below 1, weights rise the less, by as much as sizes fall along a line through all of them.

    The plan is the rule without deviations: the target's bits where alpha is 1. More than planned are spent only while
    the sum of errors would stay within 2 % of the plan's though they are paid back when all gradients are as large as the
    largest so far; fewer, only while the sum so far is within 2 % of the plan's.

    Args:
        target_bits: mean per element.
        least: bits of a step.
        most: bits of a step.
        alpha: how much of a step's error is left after a step.
        total_steps: T; None: as many as have been made are expected to follow.
    """

    def __init__(
        self, target_bits: float, least: int = 2, most: int = 8, alpha: float = 1.0, total_steps: int | None = None
    ) -> None:
        self._target, self._least, self._most, self._alpha = target_bits, least, most, alpha
        self._total = total_steps
        self._drift = -half_log2(alpha)  # by which a step's weight is above that of the one before, as log2
        self.history = History()

    def _bits(self, log2_levels: float) -> float:
        return whole_bits(log2_levels, self._least, self._most)

    @property
    def _left(self) -> float:
        steps = self.history.steps
        return max(_PAYS_BACK, steps if self._total is None else self._total - steps)

    @property
    def _returns(self) -> bool:
        history = self.history
        return history.crossings >= _RETURNS and 4 * (history.count - history.crossed) <= history.count

    def choose(self, size: float = math.nan) -> int:
        """The present step's bits.

        Args:
            size: of the present gradient; NaN: not known.
        """
        history = self.history
        if 0 < size < math.inf:
            history.log2 = half_log2(size)
        elif history.expected:
            history.log2 = min(zip(history.wrong, history.expected, strict=True))[1]
        if history.steps >= history.due:
            self._solve()
        weight = history.drift * (history.steps - history.due)
        deviation = history.log2 - history.mean if self._returns else 0.0
        planned, wish = self._bits(history.level + weight), self._bits(history.factor + weight + deviation)
        bits = int(wish) if wish.is_integer() else math.floor(wish + history.owed + 0.5)
        bits = min(self._most, max(self._least, bits))
        chosen = bits
        while not self._is_safe(chosen, planned, size):
            chosen += 1 if bits < planned else -1
        history.wish, history.planned = wish if chosen == bits else float(chosen), planned
        return chosen

    def _solve(self) -> None:
        history = self.history
        spread = math.sqrt(history.squares / history.count) if self._returns else 0.0
        mean, weights, history.drift = self._target, [0.0], 0.0
        if self._total is not None and self._drift:
            slope = history.slopes / history.times if history.count >= _SEEN else -self._drift
            history.drift = max(0.0, self._drift + min(0.0, slope))
            left = max(1, self._total - history.steps)
            points = min(left, _POINTS)
            weights = [history.drift * ((point + 0.5) * left / points - 0.5 - _EVERY) for point in range(points)]
            mean = (self._target * self._total - history.planned_bits) / left
        sizes = [weight + spread * one for weight in weights for one in (_SPREAD if spread else (0.0,))]
        history.level = factor_for_budget(weights, self._within(mean), self._bits)
        mean -= history.debt / (_PAYS_BACK if self._total is None else self._left)
        history.factor = factor_for_budget(sizes, self._within(mean), self._bits)
        history.due = history.steps + _EVERY

    def _within(self, bits: float) -> float:
        return min(float(self._most), max(float(self._least), bits))

    def _is_safe(self, bits: int, planned: float, size: float) -> bool:
        history = self.history
        size = size if 0 < size < math.inf else history.size
        debt = history.debt + bits - planned
        if abs(debt) < 1 or debt * (bits - planned) <= 0:
            return True  # whole numbers about the plan, or paid back
        if abs(debt) > 1 + _DEBT * self._target * history.steps:
            return False
        error, plan = (
            before * self._alpha + size * error_of(one)
            for before, one in ((history.error, bits), (history.planned_error, planned))
        )
        if debt > 0:
            top, whole = max(history.largest, size), max(self._least + 1, math.ceil(planned))
            error += top * debt * (error_of(whole - 1) - error_of(whole)) - _WORSE * top * self._left * error_of(
                planned
            )
        return error <= (1 + _WORSE) * plan

    def account(self, size: float, bits: int) -> None:
        """Records the present step's bits and the size of its gradient; a size of 0 or one that is not finite is unknown."""
        history, planned = self.history, self.history.planned
        history.steps += 1
        history.planned_bits += planned
        history.debt += bits - planned
        if not history.wish.is_integer():
            history.owed = max(-1.0, min(1.0, history.owed + history.wish - bits))
        if not math.isnan(history.log2):
            self._place(history.log2)
        if not 0 < size < math.inf:
            return  # the next is expected to be as those before
        history.error = history.error * self._alpha + size * error_of(bits)
        history.planned_error = history.planned_error * self._alpha + size * error_of(planned)
        history.size, history.largest = size, max(history.largest, size)
        log2 = half_log2(size)
        expected = history.expected or [log2] * len(_FOLLOWS)
        history.wrong = [0.98 * one + (log2 - was) ** 2 for one, was in zip(history.wrong, expected, strict=True)]
        history.expected = [was + share * (log2 - was) for was, share in zip(expected, _FOLLOWS, strict=True)]

    def _place(self, log2: float) -> None:
        """Counts how often sizes cross their mean: from half a deviation on one side of it to as far on the other."""
        history = self.history
        history.count += 1
        before = log2 - history.mean
        history.mean += before / history.count
        history.squares += before * (log2 - history.mean)
        history.times += (history.count**2 - history.count) / 4
        history.slopes += before * (history.count - 1) / 2
        far = 0.5 * math.sqrt(history.squares / history.count)
        side = (log2 > history.mean + far) - (log2 < history.mean - far)
        if side and side != history.side:
            history.crossings += history.side != 0
            history.side, history.crossed = side, history.count
