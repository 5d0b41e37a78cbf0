"""Step sizes, and lazy penalties: a weight's penalties are applied when it is next touched.

L2 is proximal: after each step every weight is divided by `1 + eta l2`. L1 is cumulative (Tsuruoka and others): of the total
penalty so far, `l1_due`, a weight has moved towards zero by `l1_applied`, and it never crosses zero; the rest is applied
when a step moves the weight away from zero again. That gives more exact zeros than a step-by-step threshold, which the
noise of SGD outruns.

Applied eagerly, this would touch every weight at every example. Instead the weights are stored as v with w = scale v:

* the division changes only `scale`;
* `l1_due` is one running total (in units of v), applied to a weight when an example touches it, for all steps since the last
  time.

Both depend only on the number of the step, so threads need not share them: `schedule_penalties` computes them for every
chunk that a thread may begin.

Reference: Tsuruoka, Tsujii, Ananiadou, "Stochastic Gradient Descent Training for L1-regularized Log-linear Models with
Cumulative Penalty", 2009, section 3.2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paceline.sparse.instructions import compiled

CONSTANT, OPTIMAL, INVSCALING = range(3)

SMALLEST_SCALE = 1e-6
"""Below this, penalties are applied to all weights: single precision still holds v = w / scale well."""


class PassPlan(NamedTuple):
    """Parameters of a pass; `step` counts examples from 0, over all passes."""

    loss: int
    epsilon: float
    schedule: int
    eta: float
    power: float
    offset: float
    l1: float
    l2: float
    adagrad: bool
    tracking: bool
    intercept_rate: float
    chunk: int


@compiled
def step_size(plan: PassPlan, step: int) -> float:
    """The learning rate at a step: constant, 1 / (alpha (offset + step)), or inverse scaling."""
    if plan.schedule == OPTIMAL:
        return plan.eta / (plan.offset + step)  # eta is 1 / alpha
    if plan.schedule == INVSCALING:
        return plan.eta / (step + 1.0) ** plan.power
    return plan.eta


@compiled
def schedule_penalties(
    plan: PassPlan, first_step: int, count: int, scale: float, l1_due: float, scales: np.ndarray, l1_dues: np.ndarray
) -> int:
    """Fills in `scale` and `l1_due` at the beginning of each chunk and at the end.

    Returns:
        The number of steps before the scale becomes too small; at least one.
    """
    penalised = plan.l1 > 0.0 or plan.l2 > 0.0
    steady = penalised and plan.l1 == 0.0 and plan.schedule == CONSTANT
    chunk = 0
    done = 0
    while done < count:
        scales[chunk], l1_dues[chunk] = scale, l1_due
        chunk += 1
        stop = min(done + plan.chunk, count)
        if steady:  # the usual case, in closed form: a serial loop over all steps would delay the other threads
            most = int(math.log(scale / (0.1 * SMALLEST_SCALE)) / math.log1p(plan.eta * plan.l2)) + 1
            moved = min(stop - done, most)
            scale *= math.exp(-moved * math.log1p(plan.eta * plan.l2))
            done += moved
            if done < stop:
                break
        elif penalised:
            while done < stop and scale >= 0.1 * SMALLEST_SCALE:
                eta = step_size(plan, first_step + done)
                l1_due += eta * plan.l1 / scale
                scale /= 1.0 + eta * plan.l2
                done += 1
            if done < stop:
                break
        else:
            done = stop
        if scale < SMALLEST_SCALE:
            break
    scales[chunk], l1_dues[chunk] = scale, l1_due
    return done


@compiled
def apply_l1(v: float, l1_due: float, l1_applied: float) -> float:
    """The weight after all of the L1 that is due; `l1_applied` is negative for weights that were positive."""
    if v > 0.0:
        return max(v - (l1_due + l1_applied), v * 0.0)
    if v < 0.0:
        return min(v + (l1_due - l1_applied), v * 0.0)
    return v


@compiled
def settle(weights: np.ndarray, l1_applied: np.ndarray, scale: float, l1_due: float) -> None:
    """Applies the penalties to every weight, so that the scale becomes 1. The caller multiplies `l1_due` by the scale."""
    number = weights.dtype.type
    for place in range(weights.size):
        if l1_applied.size:
            after = apply_l1(weights[place], number(l1_due), l1_applied[place])
            l1_applied[place] = (l1_applied[place] + (after - weights[place])) * number(scale)
            weights[place] = after
        weights[place] *= number(scale)
