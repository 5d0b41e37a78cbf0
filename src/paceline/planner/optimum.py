"""Estimates the minimum loss from curves that have not reached it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

_SHARES = (1e-6, 3.0)  # of the observed fall: how far below the lowest loss the optimum may be
_GRID = 60
_EXACT = 1e-12  # variance of log suboptimality below which a curve counts as matched


def estimate_optimum(curves: Sequence[tuple[np.ndarray, np.ndarray]], lower_bound: float | None = None) -> float:
    """P* with the smoothest log suboptimality of the curves: the maximum likelihood under 1, i, sqrt i and log i plus noise.

    The likelihood is that of the losses themselves, so a low P*, under which every curve looks flat, gains nothing. The
    paper instead does one long run and takes a little less than its last loss: do that, and pass the optimum, if you can.
    The result is below the lowest loss by at least a millionth and at most three times the observed fall.

    Args:
        curves: iterations (points,) and losses (points,) of each.
        lower_bound: the optimum is not below this, except for that millionth.
    """
    lowest = min(float(losses.min()) for _, losses in curves)
    fall = max(float(losses.max()) for _, losses in curves) - lowest
    if fall <= 0:
        fall = abs(lowest) or 1.0
    least, most = _SHARES
    if lower_bound is not None and (most := min(most, (lowest - lower_bound) / fall)) <= 2 * least:
        return lowest - least * fall
    projections = []
    for i, _ in curves:
        basis = np.stack([np.ones_like(i), i, np.sqrt(i), np.log(i)], axis=-1)
        Q, _ = np.linalg.qr(basis / np.linalg.norm(basis, axis=0))
        projections.append(Q)
    total = sum(len(i) for i, _ in curves)

    def surprise(log_share: float) -> float:
        optimum = lowest - fall * np.exp(log_share)
        logs = [np.log(losses - optimum) for _, losses in curves]
        squares = sum(float(y @ y - (Q.T @ y) @ (Q.T @ y)) for Q, y in zip(projections, logs, strict=True))
        return total / 2 * np.log(max(squares, 0.0) / total + _EXACT) + sum(float(y.sum()) for y in logs)

    shares = np.linspace(np.log(least), np.log(most), _GRID)
    at = int(np.argmin([surprise(one) for one in shares]))
    bounds = (shares[max(0, at - 1)], shares[min(_GRID - 1, at + 1)])
    found: Any = minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return lowest - fall * float(np.exp(found.x))
