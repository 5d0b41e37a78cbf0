"""Linear models trained by Hogwild!: one object that makes passes over a matrix."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np

from paceline.errors import PacelineError, UsageError
from paceline.sparse.hot import collect, fill_exchange, thread_copies, tiers_for
from paceline.sparse.instructions import FAST, compiled
from paceline.sparse.losses import Loss
from paceline.sparse.rows import Rows, frequencies
from paceline.sparse.steps import SMALLEST_SCALE, PassPlan, schedule_penalties, settle
from paceline.sparse.team import Team, shuffle
from paceline.sparse.walk import LIMITED, LOSS, OTHERS, ROWS, Examples, Model, walk, walk_classes
from paceline.system import compilation

DISCIPLINES = ("copies", "shared")
CHUNK = 256
LARGEST_COPY = 2**26
"""Bytes of weights that threads still have copies of. Larger vectors do not fit into any cache, and threads seldom
meet in them."""


class DivergedError(PacelineError, ValueError):
    """Weights became infinite or not a number."""


@dataclass(frozen=True)
class Pass:
    """Results of one pass: mean training loss during it (NaN if not requested), time, and staleness.

    `staleness` is the mean number of updates by other threads while a thread makes one; `limited` counts slopes so
    steep that they were limited, which does not happen with good step sizes.
    """

    loss: float
    seconds: float
    examples: int
    staleness: float
    limited: int


@dataclass
class LinearModel:
    """Weights of `outputs` linear functions of `features` numbers, and the state of training.

    Not thread-safe: run one `learn` at a time. Weights are in `dtype`, intercepts in double precision.
    """

    features: int
    outputs: int
    dtype: np.dtype
    steps: int = 0
    coordinates: np.ndarray = field(init=False)
    squares: np.ndarray = field(init=False)
    intercepts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype)
        self.coordinates = np.zeros((self.features, self.outputs), self.dtype)
        self.squares = np.zeros(0, self.dtype)
        self.intercepts = np.zeros(self.outputs)

    def learn(
        self,
        rows: Rows,  # the matrix; not copied
        # One number per row in the weights' type; -1 and +1 for classes, their number with several outputs.
        targets: np.ndarray,
        plan: PassPlan,  # losses, penalties and steps
        team: Team,  # the threads
        *,
        loss: Loss | None = None,  # a user-defined loss, in place of the plan's
        weights: np.ndarray | None = None,  # one per row, or None
        balance: np.ndarray | None = None,  # (outputs, 2), weights of examples outside, and inside, an output's class
        subset: np.ndarray | None = None,  # numbers of the rows to train on; all by default
        seed: int | None = 0,  # of the order of examples; None visits them in their order
        # "copies" gives each thread a copy of the weights, merged periodically (`hot.py`); with "shared" all write to
        # one vector.
        discipline: str = "copies",
    ) -> Learning:
        """Begins training on a matrix; `Learning.make_pass` makes the passes."""
        kind = np.int32 if rows.begins.size < 2**31 else np.int64
        order = np.arange(len(targets), dtype=kind) if subset is None else subset.astype(kind)
        examples = Examples(
            order,
            targets,
            np.zeros(0, self.dtype) if weights is None else weights,
            np.ones((self.outputs, 2)) if balance is None else np.asarray(balance, float),
        )
        return Learning(self, rows, examples, plan, team, loss, seed, discipline)


class Learning:
    """Passes of a model over a matrix.

    Attributes:
        tiers: the merge schedule, with copies on several threads; otherwise None.
        discipline: as requested; "shared" if copies are not used on several threads: with Adagrad, L1 and large models.
    """

    def __init__(
        self,
        model: LinearModel,
        rows: Rows,
        examples: Examples,
        plan: PassPlan,
        team: Team,
        loss: Loss | None,
        seed: int | None,
        discipline: str,
    ) -> None:
        self.model, self.rows, self.examples, self.team, self._seed = model, rows, examples, team, seed
        count = examples.order.size
        if discipline not in DISCIPLINES:
            raise UsageError(f"discipline must be one of {', '.join(DISCIPLINES)}, not {discipline!r}.")
        self.plan = plan._replace(chunk=max(1, min(CHUNK, count // (4 * team.threads))))  # parameters of passes
        shared = model.coordinates.reshape(-1)
        # Adagrad and L1 keep further numbers per weight, which threads share; so they share the weight, too.
        copying = (
            discipline == "copies"
            and team.threads > 1
            and not plan.adagrad
            and plan.l1 == 0.0
            and shared.nbytes <= LARGEST_COPY
        )
        part = count // team.threads
        self.tiers = tiers_for(frequencies(rows, model.features), part, team.threads) if copying else None
        self.discipline = "shared" if discipline == "copies" and team.threads > 1 and not copying else discipline
        self._own: list[Any] = thread_copies(team.threads, shared, model.outputs, self.tiers)
        if plan.adagrad and not model.squares.size:
            model.squares = np.full(model.coordinates.size, 1e-10, model.dtype)
        l1_applied = np.zeros(shared.size if plan.l1 > 0 else 0, model.dtype)
        self._shared = Model(shared, l1_applied, model.squares, model.intercepts)
        self._walk = _kernel(model.outputs > 1, loss)
        self._scale, self._l1_due = 1.0, 0.0
        self.passes: list[Pass] = []  # the passes so far

    def make_pass(self, **changes: Any) -> Pass:
        """Visits every example once. `changes` replace fields of the plan, such as `eta`.

        Raises:
            DivergedError: a weight is not finite afterwards.
        """
        self.plan = plan = self.plan._replace(**changes)
        began_s = time.perf_counter()
        order = self.examples.order
        if self._seed is not None:
            shuffle(order, (self._seed * 1_000_003 + self.model.steps) % 2**63)
        report = np.zeros((self.team.threads, 16))  # on separate cache lines
        chunks = -(-order.size // plan.chunk) + 1
        scales, l1_dues = np.empty(chunks), np.empty(chunks)
        first = 0
        while first < order.size:
            step = self.model.steps
            count = schedule_penalties(plan, step, order.size - first, self._scale, self._l1_due, scales, l1_dues)
            span = (first, first + count, step)
            self._begin_walks()
            self.team.run(
                lambda thread, span=span: self._walk(
                    self.rows, self.examples, plan, self._shared, self._own[thread], span, scales, l1_dues,
                    self.team.clock, report[thread],
                )
            )  # fmt: skip
            self._end_walks()
            end = -(-count // plan.chunk)
            self._scale, self._l1_due = float(scales[end]), float(l1_dues[end])
            self.model.steps += count
            first += count
            if self._scale < SMALLEST_SCALE:
                self.settle()
        sums = report.sum(axis=0)
        loss = float(sums[LOSS]) / (order.size * self.model.outputs) if plan.tracking else math.nan
        staleness = float(sums[OTHERS] / max(1.0, sums[ROWS]))
        done = Pass(loss, time.perf_counter() - began_s, order.size, staleness, int(sums[LIMITED]))
        self.passes.append(done)
        self._check(len(self.passes))
        return done

    def _begin_walks(self) -> None:
        fill_exchange(self._own, self._shared.weights)

    def _end_walks(self) -> None:
        if self.team.threads > 1:
            collect(self._own, self._shared.weights, self._shared.intercepts)

    def settle(self) -> None:
        """Applies all penalties to the weights, so that their scale is one; call it before they are used or read."""
        if self._scale != 1.0 or self._l1_due != 0.0:
            settle(self._shared.weights, self._shared.l1_applied, self._scale, self._l1_due)
            self._scale, self._l1_due = 1.0, self._l1_due * self._scale

    def _check(self, number: int) -> None:
        if not (np.isfinite(self.model.intercepts).all() and all_finite(self.model.coordinates.reshape(-1))):
            raise DivergedError(
                f"The weights are not finite after pass {number}: the steps are too large for the data. "
                "Make eta0 smaller, or scale the data."
            )


@compiled
def all_finite(weights: np.ndarray) -> bool:
    """Whether all numbers are finite; makes no copy."""
    zero = total = weights.dtype.type(0.0)
    for place in range(weights.size):
        total += weights[place] * zero
    return total == 0.0


@functools.lru_cache(maxsize=32)
def _kernel(classes: bool, loss: Loss | None) -> Any:
    """The compiled walk; with a user-defined loss, compiled from the same source."""
    built_in = walk_classes if classes else walk
    if loss is None:
        return built_in
    value, slope = (compilation.compiled(function, cached=False) for function in (loss.value, loss.slope))
    source = built_in.py_func
    own = {
        **source.__globals__,
        "value_of": compilation.compiled(lambda code, p, y, epsilon: value(p, y), cached=False),
        "slope_of": compilation.compiled(lambda code, p, y, epsilon: slope(p, y), cached=False),
    }
    options: dict[str, Any] = {"nogil": True, "fastmath": FAST, "_nrt": False}
    return compilation.compiled(FunctionType(source.__code__, own), cached=False, **options)
