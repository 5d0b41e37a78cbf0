"""One thread's part of a pass over the examples: the loop of Hogwild!.

Threads claim chunks of a shuffled order, so a preempted thread delays at most one chunk, and all threads have nearly the
same step number, on which learning rates and penalties depend. With one thread this is plain SGD, step by step.

    x = w . z + b;  g = slope(x, y);  w -= eta g z;  b -= eta g;  the penalties' proximal step (steps.py)

Reference: Niu, Recht, Ré, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", 2011,
arXiv:1106.5730, Algorithm 1, as in its experiments: full updates, examples without replacement.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.memory.atomics import fetch_add, load
from paceline.sparse.hot import LINE, Copies, copy_model, merge, merge_intercept
from paceline.sparse.instructions import compiled
from paceline.sparse.losses import slope_of, value_of
from paceline.sparse.rows import Rows, add, add_adagrad, apply_l1_to_row, dot, prefetch_rows
from paceline.sparse.steps import PassPlan, step_size

U = np.uint64
LOSS, ROWS, OTHERS, LIMITED = range(4)
"""What a thread reports: sum of losses; examples; examples that others claimed during its own chunks; slopes that
were limited."""

STEEPEST = 1e12
"""Slopes are limited to this, as in scikit-learn, so that unscaled data gives a warning and finite weights."""


class Examples(NamedTuple):
    """The training data: row numbers in the order of the pass, one target per row, weights (or none)."""

    order: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    balance: np.ndarray  # (classes, 2): weights of the class's absence and presence


class Model(NamedTuple):
    """The parameters, shared by all threads: coordinate j of class k at `j * classes + k`."""

    weights: np.ndarray
    l1_applied: np.ndarray
    squares: np.ndarray
    intercepts: np.ndarray


@compiled
def walk(
    rows: Rows,
    examples: Examples,
    plan: PassPlan,
    model: Model,
    copies: Copies,
    span: tuple[int, int, int],
    scales: np.ndarray,
    l1_dues: np.ndarray,
    clock: int,
    report: np.ndarray,
) -> None:
    """Learns from chunks of `order[first:last]` until none is left; one output.

    `span` is the first and last position and the number of the first position's step; `scales` and `l1_dues` are the
    weights' scale and the L1 that is due at the beginning of each chunk; `clock` is the address of the counter of claimed
    chunks, followed by the words of `merge` one line later; the thread adds its counts to `report`.
    """
    order, weights = examples.order, copies.own
    first, last, first_step = span
    since = copies.late
    copy_model(copies, model.weights, model.intercepts)
    intercept = copies.intercepts[0]
    while True:
        chunk = fetch_add(clock, 1)
        start = first + chunk * plan.chunk
        if start >= last:
            break
        stop = min(start + plan.chunk, last)
        scale, l1_due = scales[chunk], l1_dues[chunk]
        for position in range(start, stop):
            prefetch_rows(rows, order, examples.targets, position, last)
            row = U(order[U(position)])
            head, end = U(rows.begins[row]), U(rows.begins[row + U(1)])
            if plan.l1 > 0.0:
                apply_l1_to_row(rows, head, end, weights, 1, model.l1_applied, l1_due)
            product = dot(rows, head, end, weights)
            prediction = scale * float(product) + intercept
            target = float(examples.targets[row])
            emphasis = examples.balance[0, 1 if target > 0.0 else 0]
            if examples.weights.size:
                emphasis *= float(examples.weights[row])
            if plan.tracking:
                report[LOSS] += emphasis * value_of(plan.loss, prediction, target, plan.epsilon)
            slope = emphasis * slope_of(plan.loss, prediction, target, plan.epsilon)
            if abs(slope) > STEEPEST:
                slope = STEEPEST if slope > 0.0 else -STEEPEST
                report[LIMITED] += 1.0
            eta = step_size(plan, first_step + position - first)
            if slope != 0.0:
                intercept -= eta * slope * plan.intercept_rate
                if plan.adagrad:
                    add_adagrad(rows, head, end, weights, model.squares, slope, eta / scale)
                else:
                    add(rows, head, end, weights, -eta * slope / scale)
            l1_due += eta * plan.l1 / scale
            scale /= 1.0 + eta * plan.l2
            since += 1
            if copies.every and since % copies.every == 0:
                intercept = merge_intercept(copies, model.intercepts, 0, intercept)
                merge(copies, model.weights, since, clock + LINE)
        report[ROWS] += stop - start
        report[OTHERS] += (load(clock) - chunk - 1) * plan.chunk
    if copies.every:
        copies.intercepts[0] = intercept
    else:
        model.intercepts[0] = intercept


@compiled
def walk_classes(
    rows: Rows,
    examples: Examples,
    plan: PassPlan,
    model: Model,
    copies: Copies,
    span: tuple[int, int, int],
    scales: np.ndarray,
    l1_dues: np.ndarray,
    clock: int,
    report: np.ndarray,
) -> None:
    """Like `walk`, with one output per class: a target k is +1 for class k and -1 for the others, in one pass."""
    order, weights = examples.order, copies.own
    first, last, first_step = span
    classes = U(model.intercepts.size)
    product, slopes = copies.products, copies.slopes
    intercepts = copies.intercepts
    since = copies.late
    copy_model(copies, model.weights, model.intercepts)
    while True:
        chunk = fetch_add(clock, 1)
        start = first + chunk * plan.chunk
        if start >= last:
            break
        stop = min(start + plan.chunk, last)
        scale, l1_due = scales[chunk], l1_dues[chunk]
        for position in range(start, stop):
            prefetch_rows(rows, order, examples.targets, position, last)
            row = U(order[U(position)])
            head, end = U(rows.begins[row]), U(rows.begins[row + U(1)])
            shift = head if rows.dense else U(0)
            if plan.l1 > 0.0:
                apply_l1_to_row(rows, head, end, weights, model.intercepts.size, model.l1_applied, l1_due)
            for c in range(classes):
                product[c] = 0.0
            for k in range(head, end):
                j, x = U(rows.indices[k - shift]) * classes, rows.values[k]
                for c in range(classes):
                    product[c] += weights[j + c] * x
            eta = step_size(plan, first_step + position - first)
            target = int(examples.targets[row])
            emphasis = float(examples.weights[row]) if examples.weights.size else 1.0
            moves = False
            for c in range(classes):
                here = 1 if target == int(c) else 0
                share = emphasis * examples.balance[c, here]
                prediction, y = scale * float(product[c]) + intercepts[c], 2.0 * here - 1.0
                if plan.tracking:
                    report[LOSS] += share * value_of(plan.loss, prediction, y, plan.epsilon)
                slope = share * slope_of(plan.loss, prediction, y, plan.epsilon)
                if abs(slope) > STEEPEST:
                    slope = STEEPEST if slope > 0.0 else -STEEPEST
                    report[LIMITED] += 1.0
                slopes[c] = slope
                intercepts[c] -= eta * slope * plan.intercept_rate
                moves |= slope != 0.0
            if moves:
                step = weights.dtype.type(eta / scale)
                for k in range(head, end):
                    j, x = U(rows.indices[k - shift]) * classes, rows.values[k]
                    if plan.adagrad:
                        for c in range(classes):
                            gradient = slopes[c] * x
                            if gradient != 0.0:
                                model.squares[j + c] += gradient * gradient
                                weights[j + c] -= step * gradient / np.sqrt(model.squares[j + c])
                    else:
                        for c in range(classes):
                            weights[j + c] -= step * slopes[c] * x
            l1_due += eta * plan.l1 / scale
            scale /= 1.0 + eta * plan.l2
            since += 1
            if copies.every and since % copies.every == 0:
                for c in range(classes):
                    intercepts[c] = merge_intercept(copies, model.intercepts, c, intercepts[c])
                merge(copies, model.weights, since, clock + LINE)
        report[ROWS] += stop - start
        report[OTHERS] += (load(clock) - chunk - 1) * plan.chunk
    if not copies.every:
        for c in range(classes):
            model.intercepts[c] = intercepts[c]
