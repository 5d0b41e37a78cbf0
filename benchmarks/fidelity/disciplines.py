"""Other ways for threads to share one vector, from the literature, with which Hogwild! is compared; all are slower.

* "atomic": every coordinate's addition is atomic. No update is lost.
* "locks": AIG of the Hogwild! paper. A thread locks all coordinates of its example while it updates them. Locks are
  striped: neighbouring coordinates share one. They are acquired in ascending order, which prevents deadlocks.
* "round-robin": RR. Gradients are computed in parallel, and updates made in turn: example k after example k - 1.
* "replicas": HogWild++. Each thread has a replica, and a token circulates: the thread that has held it for `DELAY` updates
  mixes its replica with the next one's, and passes it on. (In its paper the threads of one processor socket share a replica.)

Only for one output, built-in losses, L2 and the same steps for all coordinates; "locks" needs rows with rising indices.
With one thread, all are plain SGD.

References: Niu, Recht, Ré, Wright, "Hogwild!", 2011, arXiv:1106.5730, section 6 (AIG, RR). Langford, Smola, Zinkevich,
"Slow Learners are Fast", 2009 (RR). Zhang, Hsieh, Akella, "HogWild++: A New Mechanism for Decentralized Asynchronous
Stochastic Gradient Descent", 2016, Algorithm 1; constants as in its code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from scipy.optimize import root_scalar

from paceline.memory.atomics import compare_and_swap, fetch_add, load, pause, store
from paceline.sparse.hot import LINE
from paceline.sparse.instructions import add_atomically, compiled
from paceline.sparse.linear import Learning, LinearModel
from paceline.sparse.losses import slope_of, value_of
from paceline.sparse.rows import Rows, add, dot, prefetch_rows
from paceline.sparse.steps import PassPlan, step_size
from paceline.sparse.team import Team
from paceline.sparse.walk import LIMITED, LOSS, OTHERS, ROWS, STEEPEST, Examples, Model

OTHER = ("atomic", "locks", "round-robin", "replicas")
ATOMIC, LOCKS, ROUND_ROBIN, REPLICAS = range(len(OTHER))

U = np.uint64
STRIPES = 2**16
DELAY = 256
TOLERANCE = 1e-2
PATIENCE = 200
"""Looks at a word before a thread gives way: with more threads than cores, the one it waits for may not be running."""


@intrinsic
def give_way(typing_context):
    """Yields this core to another thread, like `os.sched_yield`."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), generate


class Resources(NamedTuple):
    """One thread's resources for its discipline; unused arrays are empty."""

    kind: int
    thread: int
    threads: int
    locks: np.ndarray  # one word per stripe of coordinates, and one for the intercept
    width: int  # coordinates in a stripe
    replicas: np.ndarray  # (threads, features + 1), the intercept last
    snapshots: np.ndarray  # the replicas after their last exchange
    keep: float  # lambda: the share of the next replica that an exchange keeps
    push: float  # beta: the share of a replica's change that the next one gets


class ComparedLearning(Learning):
    """Passes of a model over a matrix, with one of these disciplines; as `LinearModel.learn` begins them."""

    def __init__(
        self,
        model: LinearModel,
        rows: Rows,
        targets: np.ndarray,
        plan: PassPlan,
        team: Team,
        *,
        discipline: str,
        weights: np.ndarray | None = None,
        balance: np.ndarray | None = None,
        seed: int | None = 0,
    ) -> None:
        none, alike = np.zeros(0, model.dtype), np.ones((1, 2))
        order = np.arange(len(targets), dtype=np.int32)
        examples = Examples(order, targets, none if weights is None else weights, alike if balance is None else balance)
        super().__init__(model, rows, examples, plan, team, None, seed, "shared")
        if discipline == "round-robin":
            self.plan = self.plan._replace(chunk=1)
        self.discipline = discipline
        self._own = resources_for(discipline, team.threads, self._shared.weights)
        self._walk = walk_by_discipline

    def _begin_walks(self) -> None:
        pass

    def _end_walks(self) -> None:
        if self._own[0].replicas.size:
            average(self._own[0], self._shared.weights, self._shared.intercepts)


def resources_for(discipline: str, threads: int, shared: np.ndarray) -> list[Resources]:
    """Each thread's resources; locks and replicas are shared by all."""
    kind = OTHER.index(discipline)
    width = -(-shared.size // STRIPES)
    locks = np.zeros(-(-shared.size // width) + 1 if kind == LOCKS else 0, np.int64)
    replicas = np.zeros((threads, shared.size + 1) if kind == REPLICAS else (0, 0), shared.dtype)
    push = _push(threads)
    keep = 1.0 - push ** (threads - 1)
    snapshots = np.zeros_like(replicas)
    return [
        Resources(kind, thread, threads, locks, width, replicas, snapshots, keep, push) for thread in range(threads)
    ]


def _push(threads: int) -> float:
    """Beta of HogWild++: beta**n + beta = 1, so that a change counts once after a full round."""
    return root_scalar(lambda beta: beta**threads + beta - 1, bracket=(0.0, 1.0)).root


@compiled
def walk_by_discipline(
    rows: Rows,
    examples: Examples,
    plan: PassPlan,
    model: Model,
    resources: Resources,
    span: tuple[int, int, int],
    scales: np.ndarray,
    l1_dues: np.ndarray,
    clock: int,
    report: np.ndarray,
) -> None:
    """Like `walk`, with another discipline. For round-robin, a chunk must be one example, and its number is its turn."""
    order, weights = examples.order, model.weights
    first, last, first_step = span
    in_turn, replicated = resources.kind == ROUND_ROBIN, resources.kind == REPLICAS
    turn = clock + LINE  # or the number of the thread that has the token
    if replicated:
        weights = resources.replicas[resources.thread]
        for j in range(model.weights.size):
            weights[j] = resources.snapshots[resources.thread, j] = model.weights[j]
        weights[-1] = resources.snapshots[resources.thread, model.weights.size] = model.intercepts[0]
    updates_with_token = 0
    chunk = resources.thread - resources.threads
    while True:
        chunk = chunk + resources.threads if in_turn else fetch_add(clock, 1)
        start = first + chunk * plan.chunk
        if start >= last:
            break
        stop = min(start + plan.chunk, last)
        scale = scales[chunk]
        for position in range(start, stop):
            prefetch_rows(rows, order, examples.targets, position, last)
            row = U(order[U(position)])
            head, end = U(rows.begins[row]), U(rows.begins[row + U(1)])
            intercept = float(weights[-1]) if replicated else model.intercepts[0]
            prediction = scale * float(dot(rows, head, end, weights)) + intercept
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
            if in_turn:
                _wait(turn, chunk)
            if slope != 0.0:
                _update(
                    rows, head, end, weights, model, resources, -eta * slope / scale, -eta * slope * plan.intercept_rate
                )
            if in_turn:
                store(turn, chunk + 1)
            scale /= 1.0 + eta * plan.l2
            if replicated and resources.threads > 1 and load(turn) == resources.thread:
                updates_with_token += 1
                if updates_with_token >= DELAY:
                    updates_with_token = 0
                    _exchange(resources)
                    store(turn, (resources.thread + 1) % resources.threads)
        report[ROWS] += stop - start
        if not in_turn:
            report[OTHERS] += (load(clock) - chunk - 1) * plan.chunk


@compiled
def _update(
    rows: Rows,
    head: np.uint64,
    end: np.uint64,
    weights: np.ndarray,
    model: Model,
    resources: Resources,
    step: float,
    shift: float,
) -> None:
    """Adds `step` times the row to the weights, and `shift` to the intercept, in the discipline's way."""
    if resources.kind == ATOMIC:
        skip = head if rows.dense else U(0)
        for k in range(head, end):
            change = weights.dtype.type(step) * rows.values[k]
            add_atomically(weights, U(rows.indices[k - skip]), change)  # pyright: ignore[reportCallIssue]
        add_atomically(model.intercepts, U(0), shift)  # pyright: ignore[reportCallIssue]
        return
    if resources.kind == LOCKS:
        _lock(rows, head, end, resources, True)
    add(rows, head, end, weights, step)
    if resources.kind == REPLICAS:
        weights[-1] += weights.dtype.type(shift)
    else:
        model.intercepts[0] += shift
    if resources.kind == LOCKS:
        _lock(rows, head, end, resources, False)


@compiled
def _lock(rows: Rows, head: np.uint64, end: np.uint64, resources: Resources, take: bool) -> None:
    """Acquires or releases the locks of a row's coordinates, in ascending order; the intercept's is the last."""
    skip = head if rows.dense else U(0)
    base: int = resources.locks.ctypes.data
    last = -1
    for k in range(head, end + U(1)):
        stripe = resources.locks.size - 1 if k == end else int(rows.indices[k - skip]) // resources.width
        if stripe != last:
            last = stripe
            if take:
                looks = 0
                while not compare_and_swap(base + 8 * stripe, 0, 1):
                    looks = _look_away(looks)
            else:
                store(base + 8 * stripe, 0)


@compiled
def _wait(word: int, value: int) -> None:
    looks = 0
    while load(word) != value:
        looks = _look_away(looks)


@compiled
def _look_away(looks: int) -> int:
    if looks < PATIENCE:
        pause()
        return looks + 1
    give_way()  # pyright: ignore[reportCallIssue]
    return 0


@compiled
def _exchange(resources: Resources) -> None:
    """Mixes a thread's replica with the next one's, while its owner continues to change it."""
    number = resources.replicas.dtype.type
    mine, base = resources.replicas[resources.thread], resources.snapshots[resources.thread]
    following = resources.replicas[(resources.thread + 1) % resources.threads]
    keep, push = number(resources.keep), number(resources.push)
    for j in range(mine.size):
        other = following[j]
        change = mine[j] - base[j]
        mixed = keep * other + (number(1.0) - keep) * mine[j]
        if abs(change) > number(TOLERANCE):
            mine[j] = base[j] = mixed + (push + keep - number(1.0)) * change
            following[j] = other + push * change
        else:  # small changes accumulate until they are worth sending
            mine[j] = mixed
            base[j] = mixed - change


def average(resources: Resources, shared: np.ndarray, intercepts: np.ndarray) -> None:
    """Sets the model to the mean of the replicas; no thread may be running."""
    mean = resources.replicas.mean(axis=0)
    shared[:] = mean[:-1]
    intercepts[0] = mean[-1]
