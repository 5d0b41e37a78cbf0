"""Losses of a prediction p and a target y, and their slopes in p: built in, or user-defined Python functions.

The kernel selects built-in losses by a number at run time (one predictable branch per example), so that all of them
share one compiled kernel. A user-defined loss gets its own kernel, compiled when it is first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.sparse.instructions import compiled

LOG, HINGE, SQUARED_HINGE, SQUARED, HUBER, MODIFIED_HUBER, PERCEPTRON, EPSILON, SQUARED_EPSILON, OWN = range(10)

CODES = {
    "log_loss": LOG,
    "hinge": HINGE,
    "squared_hinge": SQUARED_HINGE,
    "squared_error": SQUARED,
    "huber": HUBER,
    "modified_huber": MODIFIED_HUBER,
    "perceptron": PERCEPTRON,
    "epsilon_insensitive": EPSILON,
    "squared_epsilon_insensitive": SQUARED_EPSILON,
}
REGRESSION = ("squared_error", "huber", "epsilon_insensitive", "squared_epsilon_insensitive")
CLASSIFICATION = ("hinge", "log_loss", "modified_huber", "squared_hinge", "perceptron", *REGRESSION)


@dataclass(frozen=True)
class Loss:
    """A user-defined loss: plain Python functions of (prediction, target), compiled by Numba when first used.

    Args:
        value: the loss; for classes, the target is -1 or +1.
        slope: its derivative in the prediction.
    """

    value: Callable[[float, float], float]
    slope: Callable[[float, float], float]


def code_of(loss: str | Loss, allowed: tuple[str, ...]) -> int:
    """The number that identifies a loss in kernels; refuses an unknown name."""
    if isinstance(loss, Loss):
        return OWN
    if loss not in allowed:
        raise UsageError(f"Unknown loss {loss!r}; choose {', '.join(allowed)}, or pass a paceline.sparse.Loss.")
    return CODES[loss]


@compiled
def slope_of(code: int, p: float, y: float, epsilon: float) -> float:
    """Derivative of the loss in p. `epsilon` is the width of Huber's and of the insensitive losses."""
    z = p * y
    if code == LOG:
        return -y / (1.0 + math.exp(z))
    if code == HINGE:
        return -y if z <= 1.0 else 0.0
    if code == SQUARED_HINGE:
        return -2.0 * y * (1.0 - z) if z < 1.0 else 0.0
    if code == SQUARED:
        return p - y
    if code == PERCEPTRON:
        return -y if z <= 0.0 else 0.0
    if code == MODIFIED_HUBER:
        return 0.0 if z >= 1.0 else (-2.0 * y * (1.0 - z) if z >= -1.0 else -4.0 * y)
    if code == HUBER:
        return min(max(p - y, -epsilon), epsilon) if p == p else p  # NaN must not be clipped to a number
    beyond = abs(p - y) - epsilon
    if beyond <= 0.0:
        return 0.0
    sign = 1.0 if p > y else -1.0
    return sign if code == EPSILON else 2.0 * beyond * sign


@compiled
def value_of(code: int, p: float, y: float, epsilon: float) -> float:
    """The loss itself."""
    z = p * y
    if code == LOG:
        return math.log1p(math.exp(-z)) if z > -30.0 else -z
    if code == HINGE:
        return max(0.0, 1.0 - z)
    if code == SQUARED_HINGE:
        return max(0.0, 1.0 - z) ** 2
    if code == SQUARED:
        return 0.5 * (p - y) ** 2
    if code == PERCEPTRON:
        return max(0.0, -z)
    if code == MODIFIED_HUBER:
        return -4.0 * z if z < -1.0 else max(0.0, 1.0 - z) ** 2
    distance = abs(p - y)
    if code == HUBER:
        return 0.5 * distance**2 if distance <= epsilon else epsilon * (distance - 0.5 * epsilon)
    beyond = max(0.0, distance - epsilon)
    return beyond if code == EPSILON else beyond**2
