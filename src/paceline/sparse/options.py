"""Converts users' options (in scikit-learn's terms) to the kernels' parameters, and checks them."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.errors import UsageError
from paceline.sparse.losses import OWN, Loss, code_of, slope_of
from paceline.sparse.steps import CONSTANT, INVSCALING, OPTIMAL, PassPlan

LEARNING_RATES = ("constant", "optimal", "invscaling", "adaptive", "decay", "adagrad")
PENALTIES = ("l2", "l1", "elasticnet", None)
SPARSE_INTERCEPT_RATE = 0.01
"""Of the learning rate, for intercepts on sparse data: they are changed by every example, other coordinates by few."""


def plan_for(
    *,
    loss: str | Loss,
    allowed: tuple[str, ...],
    penalty: str | None,
    alpha: float,
    l1_ratio: float,
    learning_rate: str,
    eta0: float,
    power_t: float,
    epsilon: float,
    fit_intercept: bool,
    dense: bool,
    tracking: bool,
) -> PassPlan:
    """Makes an estimator's plan; refuses an option with an invalid value, and names the valid ones."""
    code = code_of(loss, allowed)
    _one_of("penalty", penalty, PENALTIES)
    _one_of("learning_rate", learning_rate, LEARNING_RATES)
    _number("alpha", alpha, lambda value: value >= 0, "0 or more")
    _number("l1_ratio", l1_ratio, lambda value: 0 <= value <= 1, "from 0 to 1")
    _number("epsilon", epsilon, lambda value: value >= 0, "0 or more")
    _number("power_t", power_t, lambda value: True, "a number")
    schedule = {"optimal": OPTIMAL, "invscaling": INVSCALING}.get(learning_rate, CONSTANT)
    offset = 1.0
    if schedule == OPTIMAL:
        _number("alpha", alpha, lambda value: value > 0, "above 0 for learning_rate='optimal'")
        eta = 1.0 / alpha
        offset = _optimal_offset(code, loss, alpha, epsilon)
    else:
        _number("eta0", eta0, lambda value: value > 0, f"above 0 for learning_rate={learning_rate!r}")
        eta = eta0
    ratio = {"l1": 1.0, "elasticnet": l1_ratio}.get(penalty or "", 0.0)
    l1, l2 = (alpha * ratio, alpha * (1.0 - ratio)) if penalty else (0.0, 0.0)
    rate = (1.0 if dense else SPARSE_INTERCEPT_RATE) if fit_intercept else 0.0
    return PassPlan(
        code, float(epsilon), schedule, float(eta), float(power_t), offset, l1, l2, learning_rate == "adagrad", tracking,
        rate, 256,
    )  # fmt: skip


def _optimal_offset(code: int, loss: str | Loss, alpha: float, epsilon: float) -> float:
    """Bottou's heuristic: the first step is as long as typical weights."""
    typical = math.sqrt(1.0 / math.sqrt(alpha))
    slope = (
        loss.slope(-typical, 1.0) if code == OWN and isinstance(loss, Loss) else slope_of(code, -typical, 1.0, epsilon)
    )
    first = typical / max(1.0, abs(float(slope)))
    return 1.0 / (first * alpha)


def _one_of(name: str, value: object, known: tuple[str | None, ...]) -> None:
    if not (value is None or isinstance(value, str)) or value not in known:
        raise UsageError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}.")


def _number(name: str, value: object, good: Callable[[float], bool], meaning: str) -> None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or not good(number):
        raise UsageError(f"{name} must be {meaning}, not {value!r}.")
