"""The replica behind `attach`: a worker program that runs as a greenlet inside the user's loop.

The worker program of an algorithm is blocking code that requests gradients; the user's loop is blocking code that computes
them. The program therefore runs as a greenlet: it resumes when the loop fetches a batch and in the optimizer's hooks before
and after its step, and yields when it needs the loop to act. Everything runs in one thread, so no locks are needed, and the
optimizer's own step runs exactly once when the program applies a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from paceline.errors import DivergedError, NoGradient, UsageError, WorkerLostError
from paceline.loop.closures import ClosureGradient
from paceline.loop.grad_scaler import take_over_scaling
from paceline.loop.loss_scales import watch_scales
from paceline.loop.own_batches import OwnBatches
from paceline.loop.same_inputs import SameInputs
from paceline.loop.sharded import OwnedPieces
from paceline.optim.half_types import is_finite
from paceline.optim.settings import OptimizerSettings, scaled_step, settings_of, state_of
from paceline.optim.several_optimizers import SeveralOptimizers
from paceline.ports.ports import Collectives
from paceline.ports.replica import Piece
from paceline.records.accruals import Accruals, LateLosses

__all__ = ["SEES_A_PART", "AttachedReplica"]

SEES_A_PART = (
    "Under all-reduce(sharded=true) a worker sees its own part of the mean gradient only, so a loop cannot clip or change"
    " gradients between backward and step, nor scale them with GradScaler: use all-reduce without sharded."
)

_NAN = math.nan
_CHECK_EVERY_STEPS = 64  # how often parameters are checked for infinities, as the loop need not report its loss


class AttachedReplica(ClosureGradient):
    """A replica whose gradients come from the user's loop.

    Args:
        optimizer: the user's, or several as one.
        alone: this is the run's only worker.
        lockstep: whether workers go through rounds together, so that none may leave one out.
        base: as for `BaseReplica`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, alone: bool = False, lockstep: bool = False, **base: Any
    ) -> None:
        super().__init__(optimizer, **base)
        self._in_rounds = lockstep and not alone
        self._records = LateLosses(self._append or (lambda *fields: None))
        if self._append is not None:
            self._append = self._records.append
        elif alone:
            self._waits = []  # which no record reads
        self.num_begun = 0
        self._batch_samples = 0  # of the last batch, with which a loop may step once or again
        self._steps_again = False  # it has stepped again with that batch
        self._several = optimizer if isinstance(optimizer, SeveralOptimizers) else None
        self._waits_for_step = self._several is not None and self._several.in_turn
        self._ended = False
        self._ranges: dict[Any, tuple[int, int]] = {}  # where each parameter lies in the flat vector, once asked for
        self._owned: OwnedPieces | None = None
        # To switch to the program and back; not under no_grad, which would cost as much as all else that a hook does: the
        # program touches no tensor that autograd follows.
        self._program = greenlet(lambda: None)
        self._resume: Callable[[], Any] = self._program.switch
        self._return: Callable[[], Any] = self._program.switch

    # The loop's side

    def start(self, program: Callable[[], None]) -> None:
        """Runs the program up to where it waits for its first step."""

        def run() -> None:
            try:
                with suppress(NoGradient):
                    program()
            except WorkerLostError as error:  # others may have seen earlier that the run is over, and left
                self.raise_if_stopped(error)
                raise
            finally:
                self._forget()

        loop = getcurrent()
        self._program = greenlet(run, parent=loop)
        self._resume, self._return = self._program.switch, loop.switch
        self._resume()

    def run_ahead(self) -> Callable[[], None]:
        """Prepares for a first step that begins within `backward`; returns an undo function.

        For programs that, before their first gradient, read only what this worker alone changes: they run up to it.
        """
        self._runs_ahead = True
        self._resume()
        return watch_scales()

    def end(self, *, failed: bool = False) -> None:
        """Ends the program, which releases its resources: a step under way gets no gradient; at once if the loop `failed`."""
        self._ended = True
        self._records.settle(self.loss)
        if self._buckets is not None:
            self._buckets.remove()
            self.binding.release_gradients()
        if self._own is not None:
            self._own.close()
        if self._program.dead:
            return
        if failed:
            self._program.throw(GreenletExit)
        elif self._state == "idle" and self._ahead_at is None:
            self._resume()
        else:
            self.samples, self.batch, self.repeats = 0, -1, True
            self._gradient_started_s = self._gradient_ended_s = self._now_s()
            self._program.throw(NoGradient)

    def begin(self, started_s: float, batch_number: int, samples: int) -> None:
        """Begins a step, or continues it: the program reads the parameters for the gradient.

        Args:
            started_s: when the loop asked for the batch.
            batch_number: its number; negative: it has none.
            samples: in the batch; 0: the loop gets a batch again, as others have more, and its gradient weighs nothing.
        """
        self._look_for_step()
        self.forget_step()
        if self._several is not None:
            self._several.check_whole()
        if samples or self._steps_again:  # a loop that fetches ahead has yet to step with the batch before
            self._batch_samples = samples
        self._steps_again = False
        if self._state != "gradient":
            if self._records.without_loss is not None:
                self._records.settle(self.loss)
            self._begin(started_s, batch_number, samples)
        elif self._is_untouched:  # begun without a batch
            self._records.settle(_NAN)
            self.batch, self.samples = batch_number, samples
        else:  # the loop did not step: it accumulates, or skipped a step that all had agreed on
            self.samples = samples + (self._weigh_anew() if self._handed_out else self.samples)
        self.repeats = not self.samples
        self._missing = self.ranges if self.repeats else None

    def _begin(self, started_s: float, batch_number: int, samples: int) -> None:
        if self.on_progress:
            self._move_on()
        if self.outside is not None and self.outside.lasting is None:
            self.settle_outside()
        self.num_begun += 1
        self.batch = batch_number
        self.samples = samples
        self.repeats = False
        self.closure: bool | None = None
        self.scaled = self.skipped = self._overflowed = False
        self._begin_step(started_s)
        at, self._ahead_at = self._ahead_at, None
        if at is None:
            self._resume()
        else:
            self._begin_gradient(at)

    # A loop without `worker.batches`: its next step begins when the last one ends.

    def watch(self, model: nn.Module, inputs: SameInputs | None = None) -> None:
        """Supports loops that fetch their own batches: the first step begins with the first call of the model or a part.

        Not at once: with `worker.batches`, parameters are read when the first batch arrives.
        """
        self._own = OwnBatches(model, self.binding.parameters, self._called, inputs)

    def takes_batches(self) -> None:
        """The loop uses `worker.batches` from now on."""
        if self._own is not None:
            if self._own.touched:
                self._weigh()
            self._own.close()
            self._own = None

    def _called(self) -> None:
        assert self._own is not None
        self.raise_if_stopped()
        if self._closure is None or not self._closure.is_running:
            self.forget_step()
        self._look_for_step(self._own.num_passes)
        if self._state == "idle":
            self._begin_without_batch()
        elif self._handed_out:
            self._own.forget()
            self._weigh_anew()
        self._records.settle(_NAN)  # of the last step, if its loss was not reported

    def _begin_next(self) -> None:
        assert self._own is not None
        self.raise_if_stopped()
        self._own.begin_step()
        self._told_samples = 0
        if self._state == "idle":  # else GradScaler has left the step out, and the program still waits for a gradient
            self._begin_without_batch()

    def _begin_without_batch(self, samples: int = 0) -> None:
        self._begin(self._now_s(), -1, samples)

    @property
    def _is_untouched(self) -> bool:
        """Whether the step under way was begun without a batch, and the loop has done nothing for it so far."""
        return (
            self._state == "gradient"
            and not (self.samples or self.repeats)
            and not (self._own is not None and self._own.touched)
        )

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun that is not over."""
        return self._rounds is not None and self.step > self._rounds.num_ended

    def report(self, loss: float, samples: int | None = None) -> int:
        """The loss of the step under way, or of the one just made: loops report before `step()` or after it.

        Returns:
            the number of that step.
        """
        if self._state == "gradient" and not self._is_untouched:
            self.loss = loss
            if samples is not None:
                self._told_samples = samples
                if self._own is None and not self.repeats:
                    self.samples = samples
            return self.step
        self._records.settle(loss, samples)
        return self.step - (self._state == "gradient")

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient is ready: lets the program choose the parameters to apply it to."""
        if self._several is not None and not self._several.begins(optimizer):
            return
        if self._state == "idle":  # nothing of the model was called, or the loop makes several steps with one batch
            self._steps_again = True
            self._begin_without_batch(self._batch_samples if self._own is None else 0)
            self.repeats = self._own is None and not self.samples
        if self._records.without_loss is not None:
            self._records.settle(_NAN)
        self.settle_outside()
        if self._own is not None:
            self._weigh()
        if not self._handed_out:
            if self._slowness is not None:
                self._slowness.sleep(self._gradient_started_s)
            self._gradient_ended_s = self._now_s()
        self.scaled = hasattr(optimizer, "found_inf")
        if self.scaled:
            self._overflowed = take_over_scaling(optimizer)
        if self._ready is not None and not self._handed_out:
            self._hand_out_all()
            if self.scaled and self._g is not None:
                self._overflowed = not is_finite(self._g)
        if self.scaled and self._overflowed and not self._in_rounds:  # no other worker waits for it
            self._hide_gradients([p for group in optimizer.param_groups for p in group["params"]])
            self.samples = self._weighed = 0  # the step under way gets another batch
            return
        self._resume()
        if self._several is not None:
            self._several.check_turn()
        if self._state != "apply":  # the program applied nothing: the step must find no gradients
            self._hide_gradients()

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer has stepped."""
        if self._inside or self._nested:
            self._nested -= not self._inside
            return
        closure, self._closure = self._closure, None
        if closure is not None:
            closure.end()
        self._stepping = None
        if self._kept is not None:
            self._show_gradients(None if self._several is None else self._several.parameters(optimizer))
        if self._several is not None and not self._several.ends(optimizer):
            return
        if self._kept is None:
            self._resume()
        self._kept = None
        if self.on_progress:
            self._move_on()
        if self._own is not None:
            self._begin_next()
        elif self.rest is not None and self._state == "idle":  # else GradScaler has left the step out
            self.rest()
        elif self.outside is not None and self.outside.lasting is not self.binding.bound_to:
            self.outside.take(idle=True)

    # The program's side

    def _hand_over_step(self) -> None:
        self._state = "apply"
        self._return()

    def steps(self) -> Iterator[int]:
        """This worker's steps, from 1; the loop decides how many."""
        while not self._ended:
            self._state = "idle"
            self._return()
            if not self._ended:
                yield self.step

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """Lets the optimizer take its one step on `to` (P,), a copy of `of` if given: the loop's own call of `step`.

        Raises:
            UsageError: it has been taken already.
        """
        if self._state == "idle":
            raise UsageError(
                "With this delay several gradients can be due at once, and a loop of your own steps once: take a constant"
                " delay, or paceline train, whose loop is Paceline's."
            )
        begun_s = self._now_s()
        to = to if of is None else to.copy_(of)
        if to is not self.binding.rests_on:
            self.binding.bind(to)
        if self._difference is not None:
            to.add_(self._difference, alpha=scale * weight)
            self._end_apply(to, begun_s)
            return
        self.skipped = self.scaled and self._is_left_out()
        if self.skipped:
            self._end_apply(to, begun_s)
            return
        if self._g_is_mine:
            self.binding.scatter_gradients(self.g, self.missing)
        self.binding.weight_gradients(weight)
        if scale == 1.0:
            self._state = "apply"
            self._return()
        else:
            scaled_step(self._hand_over_step, self._optimizer, scale)
        self._end_apply(to, begun_s)

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on `to` (S,): the loop's own call of `step` finds these elements alone.

        Raises:
            UsageError: the loop has changed its gradients, of which the workers see different parts.
        """
        begun_s = self._now_s()
        if self.has_changed_gradients or self.scaled:
            raise UsageError(SEES_A_PART)
        if self._owned is None:
            self._owned = OwnedPieces(self.binding, self._optimizer, pieces)
        self._owned.bind(to, g, self.missing)
        try:
            self._hand_over_step()
        finally:
            self._owned.release()
        self._end_apply(to, begun_s)

    def make_state_whole(self, collectives: Collectives | None) -> None:
        """At the end: collects sharded optimizer state from all workers."""
        if self._owned is not None and collectives is not None:
            self._owned.make_whole(collectives)

    def _end_apply(self, x: torch.Tensor, begun_s: float) -> None:
        self._state = "idle"
        self._count_apply(begun_s)
        if self.step % _CHECK_EVERY_STEPS == 0 and not is_finite(x):
            raise DivergedError(f"The parameters are no longer finite at step {self.step}.")

    def _make_accruals(self) -> Accruals:
        accruals = Accruals(self._records.write)
        self._records.write = accruals.append
        return accruals

    def optimizer_settings(self) -> OptimizerSettings:
        """The user's optimizer as data."""
        return settings_of(self._optimizer, self._range_of)._replace(missing=self.missing)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Its momentum and the like."""
        return state_of(self._optimizer, self._range_of, self.binding.num_elements)

    def _range_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        self._ranges = self._ranges or dict(zip(self.binding.parameters, self.ranges, strict=True))
        return self._ranges.get(parameter)
