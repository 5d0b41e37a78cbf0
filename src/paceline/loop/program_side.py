"""The program's side of a worker in a user's loop: its gradients are the loop's, its steps those of the loop's optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch

from paceline.errors import DivergedError, UsageError
from paceline.loop.base_replica import BaseReplica
from paceline.loop.buckets import PendingGradients
from paceline.loop.carried_state import CarriedState
from paceline.loop.guards.never_stepped import StepsAwaited
from paceline.loop.guards.outside_changes import OutsideChanges
from paceline.loop.own_batches import DealtBatches
from paceline.loop.program import Program
from paceline.loop.sharded import SEES_A_PART, OwnedPieces
from paceline.loop.step_gradient import BucketedGradient, ParameterGradient
from paceline.loop.table_gradient import TableGradient
from paceline.optim.frozen import FrozenParameters
from paceline.optim.half_types import is_finite
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows
from paceline.optim.settings import OptimizerSettings, settings_of, state_of
from paceline.optim.several_optimizers import OneOptimizer, SeveralOptimizers, members_of
from paceline.ports.ports import Collectives
from paceline.ports.replica import OnBucket, OnEnd, Piece
from paceline.records.accruals import Accruals, LateLosses
from paceline.system.torch_internals import call_after_backward

_CHECK_EVERY_STEPS = 64  # how often parameters are checked for infinities, as the loop need not report its loss


class Phase(Enum):
    """What the program waits for."""

    IDLE = auto()  # the loop's next step
    AHEAD = auto()  # the same, and it has requested that step's gradient already
    GRADIENT = auto()
    APPLY = auto()  # the optimizer's step


class ProgramSide(BaseReplica):
    """Serves the program's requests: the loop runs until it has computed what the program waits for.

    Three parts are chosen once: `ParameterGradient` or `BucketedGradient`, by whether the program takes gradients in buckets;
    `DealtBatches` or `OwnBatches`, by who fetches batches; and `OneOptimizer` or `SeveralOptimizers`.

    Args:
        optimizer: the user's, or several as one.
        alone: this is the run's only worker.
        frozen: as for `CarriedState`.
        base: as for `BaseReplica`.

    Attributes:
        repeats: the loop has an earlier batch again, whose gradient weighs nothing.
        accumulates: backward passes only add up; a later one hands out the sum.
        rates_may_differ: learning rates follow this worker's own view of the progress.
    """

    outside: OutsideChanges  # what the loop does to its parameters by itself; set before the program starts

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, alone: bool, frozen: FrozenParameters | None = None, **base: Any
    ) -> None:
        super().__init__(**base)
        self.round: int | None = 0  # None: the loop's steps are never left out; 0 until `worker.batches` deals rounds
        self.repeats = self.accumulates = self.rates_may_differ = False
        # Gives the loop a copy of the newest parameters between two steps; None: it keeps those it has.
        self.rest: Callable[[], None] | None = None
        self.awaited: StepsAwaited | None = None  # watches the loop until its first step; None: it has made one
        self.claims: Any = None  # of the batches from `worker.batches`, for replays; None: it has handed out none
        self.optimizer = optimizer
        self.on_progress: list[Callable[[], None]] = []  # called before a step and after it
        self._carried = CarriedState(optimizer, self.on_progress, frozen)
        self._optimizers = optimizer if isinstance(optimizer, SeveralOptimizers) else OneOptimizer()
        self._phase = Phase.IDLE
        self._at: torch.Tensor | None = None  # the vector of a gradient requested ahead
        self._program = Program()
        self._gradient = ParameterGradient(self.binding)
        self._batches = DealtBatches()
        self._pending: PendingGradients | None = None
        self._records = LateLosses(self._append or (lambda *fields: None))
        if self._append is not None:
            self._append = self._records.append
        elif alone:
            self._waits = []  # which no record reads
        self._told_samples = 0  # by the loop, of this step
        self._weighed = 0  # samples of this step's backward passes that have been handed out before the present one
        self._waited_within_s = 0.0  # before the last backward pass ended
        self._overflowed = False  # GradScaler has found an infinity in this worker's gradients
        self._difference: torch.Tensor | None = None  # that a step on a copy has made
        self._rate_scale = 1.0  # factor on the learning rates of the step that the program waits for
        self._ended = False
        self._owned: OwnedPieces | None = None

    @property
    def idle(self) -> bool:
        """Whether the last step has ended and the next has not begun."""
        return self._phase in (Phase.IDLE, Phase.AHEAD)

    def steps(self) -> Iterator[int]:
        while not self._ended:
            self._phase = Phase.IDLE
            self._program.wait()
            if not self._ended:
                yield self.step

    # The gradient

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Lets the loop run its forward and backward pass on `at` (P,).

        With `ready`, buckets are handed out during backward and `finish` is called at its end, from within the loop's call of
        `backward`: the loop then clips or inspects the returned gradients. A second backward pass before the step adds to
        these, and all is handed out again, which is right for linear operations; `accumulates` saves the communication.

        Raises:
            NoGradient: the loop has ended.
        """
        self._read_version = version
        if finish is not None:
            self._buckets().hand_to(ready, finish)
        if self._phase is Phase.AHEAD:
            self._at = at
        else:
            self._begin_gradient(at)
        self._program.wait()

    def _buckets(self) -> BucketedGradient:
        if not isinstance(self._gradient, BucketedGradient):
            self._gradient = self._gradient.in_backward()(self.binding, self._bucket_bytes, self, self._pending)
        return self._gradient

    def wait_for_sums(self, pending: PendingGradients) -> None:
        """Hands out gradients only after other workers have added theirs."""
        self._pending = pending
        if isinstance(self._gradient, BucketedGradient):
            self._gradient.wait_for(pending)

    def _begin_gradient(self, at: torch.Tensor) -> None:
        self._waited_within_s = 0.0
        if at is not self.binding.rests_on:
            self.binding.bind(at)
        self._gradient.begin()
        self._gradient_started_s = self._now_s()
        if self.outside.lasting is not self.binding.bound_to:
            self.outside.take(is_sparse=self._gradient.rows is not None)
        if self.awaited is not None:
            self.awaited.begin(is_shared=self.outside.is_shared)
        self._phase = Phase.GRADIENT

    @property
    def g(self) -> torch.Tensor:
        """The gradient as one vector (P,), gathered at the first request in a step."""
        return self._gradient.read(weighs_nothing=self.repeats)

    @property
    def rows(self) -> Rows | None:
        return self._gradient.rows

    def take_rows(self) -> None:
        self._gradient.takes_rows = True

    def take_tables(self) -> None:
        self._gradient = TableGradient(self.binding)

    def put(self, rows: Rows, g: torch.Tensor) -> None:
        self._gradient.put(rows, g)

    @property
    def missing(self) -> Ranges:
        return self._gradient.missing

    @missing.setter
    def missing(self, agreed: Ranges) -> None:
        self._gradient.missing = agreed

    @property
    def step_gradient(self) -> ParameterGradient:
        return self._gradient

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), in memory of its own: the gradients belong to the loop."""
        return torch.sub(after, before, out=self._gradient.vector)

    # During backward, for `BucketedGradient`

    def call_after_backward(self, end: Callable[[], None]) -> None:
        call_after_backward(end)

    @property
    def adds_up(self) -> bool:
        """Whether passes only accumulate: the loop asked for it, or only a step shows whose turn it is."""
        return self.accumulates or self._optimizers.in_turn

    @property
    def waits_for_end(self) -> bool:
        """Whether buckets are sent only at the end of the pass: their weight is 0, or the worker is slowed down on purpose."""
        return self.repeats or self._slowness is not None

    def wants_gradient(self) -> bool:
        """Whether the program waits for the gradient that backward has just added to."""
        if self._phase is Phase.AHEAD and not self._batches.are_dealt:  # the loop has not called the model so far
            self._batches.see_pass()
            self._begin_without_batch()
        return self._phase is Phase.GRADIENT

    def begin_pass(self, *, is_scaled: bool) -> None:
        """A pass has computed its first gradient; raises if GradScaler scaled its loss and cannot unscale it."""
        self._weigh()
        if is_scaled:
            self.scaled = True
            if self.binding.dtype == torch.float16:
                raise UsageError(
                    "GradScaler cannot unscale gradients in float16: keep the parameters in float32 and compute under"
                    " torch.autocast, or leave GradScaler out."
                )

    def end_pass(self) -> None:
        """The gradients are computed; the rest of the pass is waiting."""
        self._end_computing()
        if self.shares is not None:  # and between several passes
            self._waited_within_s = sum(one.waited_s for one in self._waits)

    def _end_computing(self) -> None:
        if self._slowness is not None:
            self._slowness.sleep(self._gradient_started_s)
        self._gradient_ended_s = self._now_s()

    def _begin_without_batch(self, samples: int = 0) -> None:
        """Begins a step without a batch from `worker.batches`."""
        raise NotImplementedError

    def _weigh(self) -> int:
        """Counts the samples of the loop's own batches; returns how many are new."""
        before, weighed = self.samples, self._batches.weighed(self._told_samples)
        if weighed is None:
            return 0
        self.samples = weighed
        return weighed - before

    def evaluate(self, closure: Callable[[], Any], average: Callable[[], None]) -> Any:
        """Computes another gradient of the step under way; `average` averages it, unless `backward` has; returns the loss."""
        before, self._phase = self._phase, Phase.GRADIENT
        self._gradient.begin(self.ranges if self.repeats else None)
        self._batches.forget()
        try:
            loss = closure()
            self._weigh()
            self._gradient.hand_out_rest()
            average()
        finally:
            self._phase = before
        self._gradient.write_back()
        return loss

    # The step

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Lets the optimizer take its one step on `to` (P,), a copy of `of` if given: the loop's own call of `step`.

        Raises:
            UsageError: it has been taken already.
        """
        if self._phase is Phase.IDLE:
            raise UsageError(
                "With this delay several gradients can be due in one step, but your loop calls step once: take a constant"
                " delay, or use paceline train, whose loop is Paceline's."
            )
        begun_s = self._now_s()
        to = to if of is None else to.copy_(of)
        if to is not self.binding.rests_on:
            self.binding.bind(to)
        if self._difference is not None:
            to.add_(self._difference, alpha=scale * weight)
        else:
            self.skipped = self.scaled and self._is_left_out()
            if not self.skipped:
                self._step(scale, weight)
        self._end_apply(to, begun_s)

    def _step(self, scale: float, weight: float) -> None:
        self._gradient.write_back()
        if weight != 1.0:
            self.binding.weight_gradients(weight)
        self._rate_scale = scale
        self._wait_for_step()

    def _is_left_out(self) -> bool:
        """Whether GradScaler leaves this update out, while the round that it belongs to takes place.

        Where workers average gradients, one infinity is in the mean of all: they decide alike.
        """
        return not is_finite(self.g) if self._gradient.is_read else self._overflowed

    def _wait_for_step(self) -> None:
        self._phase = Phase.APPLY
        self._program.wait()

    def _end_apply(self, x: torch.Tensor, begun_s: float) -> None:
        self._phase = Phase.IDLE
        self._count_apply(begun_s)
        if self.step % _CHECK_EVERY_STEPS == 0 and not is_finite(x):
            raise DivergedError(f"The parameters are no longer finite at step {self.step}.")

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on `to` (S,): the loop's own call of `step` sees only these elements.

        Raises:
            UsageError: the loop has changed its gradients, of which the workers see different parts.
        """
        begun_s = self._now_s()
        if self._gradient.has_changed or self.scaled:
            raise UsageError(SEES_A_PART)
        if self._owned is None:
            self._owned = OwnedPieces(self.binding, self.optimizer, pieces)
        self._owned.bind(to, g, self.missing)
        try:
            self._wait_for_step()
        finally:
            self._owned.release()
        self._end_apply(to, begun_s)

    def make_state_whole(self, collectives: Collectives | None) -> None:
        """At the end: collects sharded optimizer state from all workers."""
        if self._owned is not None and collectives is not None:
            self._owned.make_whole(collectives)

    def settle_outside(self) -> None:
        """Lets the loop's own parameter changes take effect before the program continues."""
        self.changed_outside |= self.outside.settle()
        self.moves = self.outside.moves

    def carries_all(self) -> bool:
        return self._carried.is_whole()

    def prepare_to_enter(self) -> None:
        """Does what takes long, before the others wait for this newcomer; `enter` follows before the loop goes on."""
        self._carried.prepare()

    def for_newcomers(self) -> dict[str, Any]:
        return self._carried.state(self.progress) | self._counts_for_newcomers()

    def enter(self, given: dict[str, Any]) -> None:
        self._take_counts(given)
        self._carried.take(given, self.progress)

    # The record, and the optimizer as data

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        self.samples += 0 if self._told_samples else self._weighed
        self._weighed = 0
        if self.progress is not None:
            self.progress.add(self.samples, self.round_samples)
        self.round_samples = 0
        if self._append is not None:
            super()._record(applied_version, gradient_version, failed_publishes)

    @property
    def _work_s(self) -> float:
        return super()._work_s - self._waited_within_s

    def _make_accruals(self) -> Accruals:
        accruals = Accruals(self._records.write)
        self._records.write = accruals.append
        return accruals

    @property
    def rates(self) -> int:
        """A digest of the learning rates to 6 digits, as processors may differ in the last ones."""
        if self.rates_may_differ:
            return 0
        rates = [f"{float(group['lr']):.6g}" for group in self.optimizer.param_groups if "lr" in group]
        return zlib.crc32(repr(rates).encode())

    def optimizer_settings(self) -> OptimizerSettings:
        return settings_of(members_of(self.optimizer), self.binding.range_of)._replace(missing=self.missing)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return state_of(members_of(self.optimizer), self.binding.range_of, self.binding.num_elements)
