"""Choosing a few short runs that tell the most about a system model: optimal experiment design, under a budget.

Of candidates j, each with a row of features a_j and a cost c_j, weights 0 <= lambda_j <= 1 are chosen that minimise

    trace(C (sum_j lambda_j a_j a_j^T)^-1 C^T)    subject to    sum_j c_j lambda_j <= budget,

a convex program: the variance of C times the coefficients. With C = 1 that is A-optimality, as in the paper. With the
features of the points to predict as rows of C, it is the variance of these predictions, the default here.
The weights are then rounded to whole runs.

Reference: Venkataraman et al., "Ernest", NSDI 2016, section 3.2; Boyd and Vandenberghe, "Convex Optimization", 2004, 7.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from paceline.errors import UsageError
from paceline.planner.system_model import system_features

__all__ = ["ExperimentDesign", "ShortRun", "candidates", "design", "prediction_variance"]

_RANK = 1e-9
_CONDITION = 1e12
_GAP = 1e-3  # the relaxed criterion exceeds the minimum by at most this share
_ITERATIONS = 2_000
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortRun:
    """One short run: a number of workers, on this share of the full size."""

    workers: int
    size: float


@dataclass(frozen=True, kw_only=True)
class ExperimentDesign:
    """The trials to run.

    Attributes:
        trials: at least as many as there are distinguishable coefficients.
        cost: of all trials, in the unit of the given costs; at most the budget.
        weights: (candidates,) lambda, of the relaxed program.
        criterion: the trace, for the trials.
        bound: no design within the budget has a lower trace.
    """

    trials: tuple[ShortRun, ...]
    cost: float
    weights: np.ndarray
    criterion: float
    bound: float


def candidates(max_workers: int, sizes: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> list[ShortRun]:
    """Every number of workers from 1 to `max_workers`, with every size."""
    return [ShortRun(workers=m, size=size) for m in range(1, max_workers + 1) for size in sizes]


def prediction_variance(trials: Sequence[ShortRun], targets: Sequence[ShortRun]) -> np.ndarray:
    """(targets,) variance of the least-squares prediction for each target, in units of one measurement's variance."""
    A, C = _rows(trials), _rows(targets)
    A_inverse = np.linalg.pinv(A, rcond=_RANK)
    lost = np.linalg.norm(C - C @ A_inverse @ A, axis=1) > 1e-6 * np.linalg.norm(C, axis=1)
    return np.where(lost, np.inf, np.sum((C @ A_inverse) ** 2, axis=1))


def design(
    grid: Sequence[ShortRun],
    budget: float,
    *,
    costs: Sequence[float] | np.ndarray | None = None,
    targets: Sequence[ShortRun] | None = None,
    a_optimal: bool = False,
) -> ExperimentDesign:
    """Chooses the most informative trials within a budget.

    Costs: some milliseconds to a second; `grid` may have thousands of candidates.

    Args:
        grid: candidates; each is run at most once.
        budget: maximum cost of all trials together.
        costs: (candidates,) of each, above 0; None: time as in the paper, size / workers, where the
            smallest size on one worker costs 1.
        targets: what will be predicted; None: every number of workers of the grid, at its largest size.
        a_optimal: minimise the variance of the coefficients, each column divided by its mean, as the paper does.

    Raises:
        UsageError: there are no candidates, or the budget is too small to distinguish the coefficients.
    """
    if not grid:
        raise UsageError("There are no trials to choose from: name at least one number of workers and one size.")
    size = max(one.size for one in grid)
    counts = sorted({one.workers for one in grid})
    targets = [ShortRun(workers=m, size=size) for m in counts] if targets is None else targets
    smallest = min(one.size for one in grid)
    c = np.array([one.size / smallest / one.workers for one in grid] if costs is None else costs, float)
    if c.shape != (len(grid),) or not np.all(c > 0):
        raise UsageError("Each trial needs one cost above 0.")
    A, C = _directions(_rows(grid), None if a_optimal else _rows(targets))
    too_small = UsageError(
        f"A budget of {budget:g} pays for no trials that tell {A.shape[1]} coefficients apart; the {A.shape[1]} cheapest"
        f" trials cost {np.sort(c)[: A.shape[1]].sum():g}, and others may be needed."
    )
    if np.sort(c)[: A.shape[1]].sum() > budget:
        raise too_small
    weights, bound = _relaxed(A, C, c, budget)
    starts = (weights > _LEAST_WEIGHT, np.ones(len(grid), bool))
    found = [_whole(A, C, c, budget, start & (c <= budget)) for start in starts]
    affordable = [(_trace(A[its], C), its) for its in found if c[its].sum() <= budget]
    criterion, chosen = min(affordable, key=lambda one: one[0], default=(np.inf, found[0]))
    if not np.isfinite(criterion):
        raise too_small
    trials = tuple(one for one, its in zip(grid, chosen, strict=True) if its)
    return ExperimentDesign(
        trials=trials, cost=float(c[chosen].sum()), weights=weights, criterion=criterion, bound=bound
    )


def _rows(trials: Sequence[ShortRun]) -> np.ndarray:
    return system_features([one.workers for one in trials], [one.size for one in trials])


def _directions(A: np.ndarray, C: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Projects both on the directions that the candidates can distinguish: with 1 and 2 workers, log m is linear in m."""
    scale = A.mean(axis=0)
    scale[scale == 0] = 1.0
    _, singular, Vt = np.linalg.svd(A / scale, full_matrices=False)
    V = Vt[singular > _RANK * singular[0]].T
    if C is None:
        return A / scale @ V, V
    seen = C / scale @ V
    if np.any(np.linalg.norm(C / scale - seen @ V.T, axis=1) > 1e-6):
        raise UsageError(
            "What is to be predicted is no combination of the trials: add more numbers of workers or sizes."
        )
    return A / scale @ V, seen


def _trace(rows: np.ndarray, C: np.ndarray) -> float:
    M = rows.T @ rows
    if len(rows) < rows.shape[1] or np.linalg.cond(M) > _CONDITION:
        return np.inf
    return float(np.trace(C @ np.linalg.solve(M, C.T)))


def _relaxed(A: np.ndarray, C: np.ndarray, c: np.ndarray, budget: float) -> tuple[np.ndarray, float]:
    """The weights by the Frank-Wolfe method, and a lower bound of the criterion.

    The linear problem of each iteration is a fractional knapsack: take the best value per cost first. The criterion is
    convex, so the minimum of its tangent is a lower bound for every design, and tells when to stop.
    """
    weights = np.minimum(1.0, np.full(len(A), budget / c.sum()))
    bound = 0.0
    for _ in range(_ITERATIONS):
        solved = np.linalg.solve((A * weights[:, None]).T @ A, np.eye(A.shape[1]))
        value = float(np.trace(C @ solved @ C.T))
        gains = np.sum((A @ solved @ C.T) ** 2, axis=1)  # minus the gradient
        order = np.argsort(-gains / c)
        spent = np.cumsum(c[order])
        vertex = np.zeros(len(A))
        vertex[order] = np.clip((budget - (spent - c[order])) / c[order], 0.0, 1.0)
        bound = max(bound, value - float(gains @ (vertex - weights)))
        if value - bound <= _GAP * value:
            break
        weights = weights + _step(A, C, weights, vertex - weights) * (vertex - weights)
    return weights, bound


def _step(A: np.ndarray, C: np.ndarray, weights: np.ndarray, along: np.ndarray) -> float:
    """The step length with the least criterion (line search)."""
    M, D = (A * weights[:, None]).T @ A, (A * along[:, None]).T @ A

    def criterion(step: float) -> float:
        return float(np.trace(C @ np.linalg.solve(M + step * D, C.T)))

    found: Any = minimize_scalar(criterion, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-6})
    return float(found.x)


def _whole(A: np.ndarray, C: np.ndarray, c: np.ndarray, budget: float, chosen: np.ndarray) -> np.ndarray:
    """Whole trials: drops the chosen trial that is least useful for its cost until the rest fits the budget.

    Then exchanges or adds trials as long as that lowers the criterion.
    """
    chosen = chosen.copy()
    while c[chosen].sum() > budget:
        if chosen.sum() <= A.shape[1]:
            break
        solved = np.linalg.pinv(A[chosen].T @ A[chosen])
        used = np.einsum("jk,kl,jl->j", A[chosen], solved, A[chosen])
        losses = np.sum((A[chosen] @ solved @ C.T) ** 2, axis=1) / np.maximum(1 - used, _RANK) / c[chosen]
        chosen[np.flatnonzero(chosen)[np.argmin(losses)]] = False
    value = _trace(A[chosen], C)
    while np.isfinite(value):
        over = c[chosen].sum() > budget  # too few are left to drop one: replace them by cheaper ones
        best, least = None, np.inf if over else value * (1 - 1e-6)
        for leaving in np.flatnonzero(chosen) if over else (None, *np.flatnonzero(chosen)):
            kept = chosen.copy()
            if leaving is not None:
                kept[leaving] = False
            criteria = _with_one_more(A, C, kept)
            criteria[chosen | (c >= c[leaving] if over else c > budget - c[kept].sum())] = np.inf
            cost = c[kept].sum() + c
            joining = int(np.argmin(criteria * np.maximum(1.0, cost / budget)))
            if (its := criteria[joining] * max(1.0, cost[joining] / budget)) < least:
                value, least, best = criteria[joining], its, kept
                best[joining] = True
        if best is None:
            break
        chosen = best
    return chosen


def _with_one_more(A: np.ndarray, C: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(candidates,) the criterion with each of them added to those kept; infinite if coefficients are indistinguishable."""
    M = A[kept].T @ A[kept]
    if np.linalg.cond(M) < _CONDITION:  # then by the Sherman-Morrison formula
        solved = np.linalg.inv(M)
        gains = np.sum((A @ solved @ C.T) ** 2, axis=1) / (1 + np.einsum("jk,kl,jl->j", A, solved, A))
        return np.trace(C @ solved @ C.T) - gains
    all_of_them = M + A[:, :, None] * A[:, None, :]
    sound = np.linalg.cond(all_of_them) < _CONDITION
    criteria = np.full(len(A), np.inf)
    solved = np.linalg.solve(all_of_them[sound], C.T[None])  # NumPy 1 takes C.T alone for a stack of vectors
    criteria[sound] = np.trace(C @ solved, axis1=1, axis2=2)
    return criteria
