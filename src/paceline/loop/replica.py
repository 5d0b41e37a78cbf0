"""The replica behind `attach`: a worker program that runs as a greenlet inside the user's loop.

The worker program of an algorithm is blocking code that requests gradients; the user's loop is blocking code that computes
them. The program therefore runs as a greenlet: it resumes when the loop fetches a batch and in the optimizer's hooks before
and after its step, and yields when it needs the loop to act. Everything runs in one thread, so no locks are needed, and the
optimizer's own step runs exactly once when the program applies a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import NoGradient, RunStopped, WorkerLostError
from paceline.loop.closures import StepHooks
from paceline.loop.grad_scaler import HiddenGradients, take_over_scaling
from paceline.loop.guards.same_inputs import SameInputs
from paceline.loop.loss_scales import watch_scales
from paceline.loop.own_batches import DealtBatches, OwnBatches
from paceline.loop.program_side import Phase, ProgramSide
from paceline.optim.half_types import is_finite

_NAN = math.nan


class AttachedReplica(ProgramSide):
    """The loop's side of a replica: passes on to the program what the loop does."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, alone: bool = False, lockstep: bool = False, **base: Any
    ) -> None:
        super().__init__(optimizer, alone=alone, **base)
        self.step_hooks = StepHooks(self)  # to register with the loop's optimizers
        self.batches_of_step: list[int] = []  # numbers of the batches that the loop has had in this step
        self._in_rounds = lockstep and not alone  # no worker may leave one out
        self._hidden = HiddenGradients()
        self._rates: list[tuple[dict[str, Any], Any]] = []  # of the step's groups, before they were scaled
        self._batch_samples = 0  # of the last batch, with which a loop may step once or again
        self._steps_again = False  # it has stepped again with that batch

    def start(self, program: Callable[[], None]) -> None:
        """Runs the program up to where it waits for its first step."""

        def run() -> None:
            try:
                program()
            except NoGradient:
                pass
            except WorkerLostError as error:  # others may have seen earlier that the run is over, and left
                self.raise_if_stopped(error)
                raise
            finally:  # its callbacks refer to this replica, and would keep its memory
                self.evaluations = self.rest = self.before_meeting = None
                self._gradient.forget_program()

        self._program.start(run)

    def run_ahead(self) -> Callable[[], None]:
        """Prepares for a first step that begins within `backward`; returns an undo function.

        For programs that, before their first gradient, read only what this worker alone changes: they run up to it.
        """
        self._phase = Phase.AHEAD
        self._program.resume()
        return watch_scales()

    def end(self, *, failed: bool = False) -> None:
        """Ends the program, which releases its resources: a step under way gets no gradient; at once if the loop `failed`."""
        self._ended = True
        self._records.settle(self.loss)
        self._gradient.close()
        self._batches.close()
        self.step_hooks.close()
        if self._program.is_over:
            return
        if failed:
            self._program.kill()
        elif self._phase is Phase.IDLE:
            self._program.resume()
        else:
            self.samples, self.batch, self.repeats = 0, -1, True
            self._gradient_started_s = self._gradient_ended_s = self._now_s()
            self._program.end_by(NoGradient)

    def begin(self, started_s: float, batch_number: int, samples: int) -> None:
        """Begins a step, or continues it: the program reads the parameters for the gradient.

        Args:
            started_s: when the loop asked for the batch.
            batch_number: its number; negative: it has none.
            samples: in the batch; 0: the loop gets a batch again, as others have more, and its gradient weighs nothing.
        """
        self._look_for_step()
        self.step_hooks.forget_step()
        if self._rates:  # of a step that has raised an error
            self._restore_rates()
        self._optimizers.check_whole()
        if samples or self._steps_again:  # a loop that fetches ahead has yet to step with the batch before
            self._batch_samples = samples
        self._steps_again = False
        if self._phase is not Phase.GRADIENT:
            if self._records.without_loss is not None:
                self._records.settle(self.loss)
            self.batches_of_step = []
            self._begin(started_s, batch_number, samples)
            self.batches_of_step = [batch_number]
        elif self._is_untouched:  # begun without a batch
            self._records.settle(_NAN)
            self.batch, self.samples = batch_number, samples
            self.batches_of_step = [batch_number]
        else:  # the loop did not step: it accumulates, or skipped a step that all had agreed on
            self.batches_of_step.append(batch_number)
            self.samples = samples + (self._weigh_anew() if self._gradient.has_returned else self.samples)
        self.repeats = not self.samples
        self._gradient.missing = self.ranges if self.repeats else None

    def _begin(self, started_s: float, batch_number: int, samples: int) -> None:
        for call in self.on_progress:
            call()
        if self.outside.lasting is None:
            self.settle_outside()
        self.batch = batch_number
        self.samples, self._told_samples = samples, 0
        self.repeats = False
        self.closure: bool | None = None
        self.scaled = self.skipped = self._overflowed = False
        self._begin_step(started_s)
        if self._phase is Phase.AHEAD:
            assert self._at is not None
            self._begin_gradient(self._at)
        else:
            self._program.resume()

    def _begin_without_batch(self, samples: int = 0) -> None:
        self._begin(self._now_s(), -1, samples)

    # A loop without `worker.batches`: its next step begins when the last one ends.

    def watch(self, model: nn.Module, inputs: SameInputs | None = None) -> None:
        """Supports loops that fetch their own batches: the first step begins with the first call of the model or a part.

        Not at once: with `worker.batches`, parameters are read when the first batch arrives.
        """
        self._batches = OwnBatches(model, self.binding.parameters, self._called, inputs)

    def takes_batches(self) -> None:
        if self._batches.touched:
            self._weigh()
        self._batches.close()
        self._batches = DealtBatches()

    def _called(self) -> None:
        self.raise_if_stopped()
        if not self.step_hooks.is_evaluating:
            self.step_hooks.forget_step()
        self._look_for_step(self._batches.num_passes)
        if self.idle:
            self._begin_without_batch()
        elif self._gradient.has_returned:
            self._batches.forget()
            self._weigh_anew()
        elif not self._batches.touched:  # until now the loop has fetched its batch
            self._gradient_started_s = self._now_s()
            self._input_s = self._gradient_started_s - self._started_s
        self._records.settle(_NAN)  # of the last step, if its loss was not reported

    def _look_for_step(self, num_passes: int = 0) -> None:
        """The loop is about to compute, after `num_passes` backward passes if they are counted."""
        if self.awaited is not None:
            self.awaited.look(num_passes)
            if self._phase is Phase.GRADIENT and not self.outside.loads.were_any:
                self.awaited.check(has_batches=self._batches.are_dealt)

    def _weigh_anew(self) -> int:
        """Counts the next pass's samples from 0, as those so far have been handed out; returns 0."""
        self._weighed += self.samples
        self.samples = 0
        return 0

    @property
    def _is_untouched(self) -> bool:
        """Whether the step under way was begun without a batch, and the loop has done nothing for it so far."""
        return self._phase is Phase.GRADIENT and not (self.samples or self.repeats or self._batches.touched)

    @property
    def is_applying(self) -> bool:
        return self._phase is Phase.APPLY

    @property
    def is_under_way(self) -> bool:
        return self._rounds is not None and self.step > self._rounds.num_ended

    def report(self, loss: float, samples: int | None = None) -> int:
        """The loss of the step under way, or of the one just made: loops report before `step()` or after it.

        Returns:
            the number of that step.
        """
        if self._phase is Phase.GRADIENT and not self._is_untouched:
            self.loss = loss
            if samples is not None:
                self._told_samples = samples
                if self._batches.are_dealt and not self.repeats:
                    self.samples = samples
            return self.step
        self._records.settle(loss, samples)
        return self.step - (self._phase is Phase.GRADIENT)

    def raise_if_stopped(self, cause: Exception | None = None) -> None:
        if self._stopped():
            raise RunStopped("the run was stopped") from cause

    def leave_published(self) -> None:
        """Before the loop loads weights: switches to a copy if others read the published version."""
        x = self.binding.bound_to
        if self.rest is None or self.outside.is_idle or x is None or x is self._private:
            return
        self._private = x.clone() if self._private is None else self._private.copy_(x)
        self.binding.bind(self._private)
        self.outside.take(whole=True)

    # The optimizer's step

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient is ready: lets the program choose the parameters to apply it to."""
        if not self._optimizers.begins(optimizer):
            if self._phase is Phase.APPLY and self._rate_scale != 1.0:
                self._scale_rates(optimizer)
            return
        if self.idle:  # the loop did not call the model, or makes several steps with one batch
            self._steps_again = True
            self._begin_without_batch(self._batch_samples if self._batches.are_dealt else 0)
            self.repeats = self._batches.are_dealt and not self.samples
        if self._records.without_loss is not None:
            self._records.settle(_NAN)
        self.settle_outside()
        self._weigh()
        if not self._gradient.has_returned:
            self._end_computing()
        self.scaled = hasattr(optimizer, "found_inf")
        if self.scaled:
            self._overflowed = take_over_scaling(optimizer)
        if self._gradient.hand_out_rest() and self.scaled:
            self._overflowed = not is_finite(self._gradient.returned)
        if self.scaled and self._overflowed and not self._in_rounds:  # no other worker waits for it
            self._hidden.hide({*self.binding.parameters, *(p for g in optimizer.param_groups for p in g["params"])})
            self.samples = self._weighed = 0  # the step under way gets another batch
            return
        self._program.resume()
        self._optimizers.check_turn()
        if self._phase is not Phase.APPLY:  # the program applied nothing: the step must find no gradients
            self._hidden.hide(self.binding.parameters)
        elif self._rate_scale != 1.0:
            self._scale_rates(optimizer)

    def _scale_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Scales an optimizer's learning rates until it has stepped: its scheduler may step before other optimizers."""
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates:
            group["lr"] = rate * self._rate_scale

    def _restore_rates(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def apply_difference(self, optimizer: torch.optim.Optimizer, difference: torch.Tensor) -> None:
        """Lets the program apply the `difference` (P,) that a step on a copy has made."""
        self._difference = difference
        self.prepare_step(optimizer)
        self._difference = None

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._rates:
            self._restore_rates()
        was_hidden = self._hidden.show(self._optimizers.parameters(optimizer))
        if not self._optimizers.ends(optimizer):
            return
        if was_hidden:
            self._hidden.forget()
        else:
            self._program.resume()
        for call in self.on_progress:
            call()
        if not self._batches.are_dealt:
            self._begin_next()
        elif self.rest is not None and self.idle:  # else GradScaler has left the step out
            self.rest()
        elif self.outside.lasting is not self.binding.bound_to:
            self.outside.take(idle=True, is_sparse=self._gradient.rows is not None)

    def _begin_next(self) -> None:
        self.raise_if_stopped()
        self._batches.begin_step()
        self._told_samples = 0
        if self.idle:  # else GradScaler has left the step out, and the program still waits for a gradient
            self._begin_without_batch()
