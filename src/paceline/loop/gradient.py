"""The gradient of a user's loop: its parameters' own, or one flat vector, handed out in buckets while backward computes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.loop.base_replica import BaseReplica
from paceline.loop.buckets import GradientBuckets, PendingGradients
from paceline.loop.loss_scales import scale_of_pass
from paceline.loop.never_stepped import StepsAwaited
from paceline.loop.outside_changes import OutsideChanges
from paceline.loop.own_batches import OwnBatches
from paceline.loop.run_progress import RunProgress
from paceline.optim.flat import Ranges
from paceline.optim.half_types import is_finite
from paceline.system.torch_internals import call_after_backward

__all__ = ["AttachedGradient"]


class AttachedGradient(BaseReplica):
    """A replica whose gradients the loop's backward passes leave in the model's parameters.

    Args:
        base: as for `BaseReplica`.

    Attributes:
        accumulates: backward passes only add up; a later one hands out the sum.
        rates_may_differ: learning rates follow this worker's own view of the progress.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.round: int | None = 0  # as long as the loop fetches its batches by itself, there are none
        self.repeats = False  # the loop has an earlier batch again, whose gradient weighs nothing
        self._in_rounds = False  # which no worker may leave out
        self._overflowed = False  # GradScaler has found an infinity in this worker's gradients
        self._state = "idle"  # idle -> gradient -> apply -> idle: what the program waits for
        self._return: Callable[[], Any] = lambda: None  # lets the loop go on until it has that
        self._g: torch.Tensor | None = None
        self._g_is_mine = False  # the program has asked for g: it may have changed it
        self._ready: Callable[[torch.Tensor], None] | None = None
        self._finish: Callable[[], None] | None = None
        self._runs_ahead = False  # the program comes to its first gradient before the loop has begun its first step
        self._ahead_at: torch.Tensor | None = None  # where it waits for that step, it wants the gradient here
        self._loss_scale: torch.Tensor | None = None  # of the gradient that is handed out; None: it is not scaled
        self._end_of_pass = _over  # a weak reference to what a backward pass calls at its end: it dies if that raises
        self._pending: PendingGradients | None = None  # of a layout
        self._kept: dict[nn.Parameter, torch.Tensor | None] | None = None  # gradients that a step does not find
        self._handed_out = False  # what the gradients hold has been handed out, and is what came back
        self._g_version = 0  # PyTorch's count of changes of `g` when it was handed out
        self._g_missing: Ranges = ()  # the parameters that got none of it
        self._own: OwnBatches | None = None  # of a loop that fetches its batches by itself, as long as it seems to
        self._told_samples = 0  # by the loop, of this step
        self._waited_within_s = 0.0  # before the last backward pass ended
        self._weighed = 0  # samples of this step's backward passes that have been handed out before the present one
        self._waits_for_step = False  # whose gradients these are is not known before an optimizer steps
        self._progress: RunProgress | None = None
        self.on_progress: list[Callable[[], None]] = []  # called before a step and after it
        self.awaited: StepsAwaited | None = None  # until the loop's first step
        self.outside: OutsideChanges | None = None  # what the loop does to its parameters by itself; None: not begun
        self.rest: Callable[[], None] | None = None  # gives the loop a copy of the newest parameters between two steps
        self.accumulates = self.rates_may_differ = False

    _call_after_backward = staticmethod(call_after_backward)

    def wait_for_sums(self, pending: PendingGradients) -> None:
        """Hands out gradients only after other workers have added theirs."""
        numbers = {parameter: index for index, parameter in enumerate(self.binding.parameters)}
        self._pending = pending
        pending.completed.append(lambda parameter: self._complete(numbers[parameter]))

    def _forget(self) -> None:
        """Drops the ended program's callbacks, which refer to this replica and would keep its memory."""
        self._ready = self._finish = self.evaluations = self.rest = None
        self.before_meeting: Callable[[], None] | None = None

    @property
    def idle(self) -> bool:
        """Whether the last step has ended and the next has not begun."""
        return self._state == "idle"

    def count_in(self, progress: RunProgress) -> None:
        """Tells the run's progress of every step from now on."""
        self._progress = progress

    def _move_on(self) -> None:
        for call in self.on_progress:
            call()

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        self.samples += 0 if self._told_samples else self._weighed
        self._weighed = 0
        if self._progress is not None:
            self._progress.add(self.samples, self.round_samples)
        self.round_samples = 0
        if self._append is not None:
            super()._record(applied_version, gradient_version, failed_publishes)

    @property
    def _work_s(self) -> float:
        """What the step has taken without its waits."""
        return super()._work_s - self._waited_within_s

    @property
    def g(self) -> torch.Tensor:
        """The gradient as one vector (P,), gathered when first asked for in a step."""
        if self._g is None:
            self._g = self.binding.zeros()
        if not self._g_is_mine:
            self._g_is_mine = True
            if self.repeats:
                self._g.zero_()
            else:
                self._missing = self.binding.gather_gradients(self._g)
        return self._g

    def gradient(
        self,
        at: torch.Tensor,
        version: int,
        ready: Callable[[torch.Tensor], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Lets the loop run its forward and backward pass on `at` (P,).

        With `ready`, buckets are handed out during backward and `finish` is called at its end, from within the loop's call of
        `backward`: the loop then clips or inspects the returned gradients. A second backward pass before the step adds to
        these, and all is handed out again, which is right for linear operations; `accumulates` saves the communication.

        Raises:
            NoGradient: the loop has ended.
        """
        self._read_version = version
        self._ready, self._finish, self._hands_out = ready, finish, ready is not None
        if ready is not None and self._buckets is None:
            if self._g is None:
                self._g = self.binding.zeros()
            self._buckets = GradientBuckets(self.binding, self._g, self._on_gradient, self._bucket_bytes)
        if self._runs_ahead:
            self._runs_ahead, self._ahead_at = False, at
            self._return()
        else:
            self._begin_gradient(at)
            self._return()

    def _begin_gradient(self, at: torch.Tensor) -> None:
        """Begins the step whose gradient is asked for at `at` (P,)."""
        self._waited_within_s = 0.0
        if at is not self.binding.rests_on:
            self.binding.bind(at)
        self._g_is_mine = self._handed_out = False
        self._missing = None
        self._gradient_started_s = self._now_s()
        if self.outside is not None and self.outside.lasting is not self.binding.bound_to:
            self.outside.take()
        if self.awaited is not None:
            self.awaited.begin(is_shared=self.outside is not None and self.outside.is_shared)
        self._state = "gradient"

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), in memory of its own: the gradients belong to the loop."""
        if self._g is None:
            self._g = self.binding.zeros()
        return torch.sub(after, before, out=self._g)

    def leave_published(self) -> None:
        """Before the loop loads weights: switches to a copy if others read the published version."""
        x = self.binding.bound_to
        if self.rest is None or self.outside is None or self.outside.is_idle or x is None or x is self._private:
            return
        self._private = x.clone() if self._private is None else self._private.copy_(x)
        self.binding.bind(self._private)
        self.outside.take(whole=True)

    def settle_outside(self) -> None:
        """Lets the loop's own parameter changes take effect before the program continues."""
        if self.outside is not None:
            self.changed_outside |= self.outside.settle()
            self.moves = self.outside.moves

    def _look_for_step(self, num_passes: int = 0) -> None:
        """The loop is about to compute, after so many backward passes if they are counted."""
        if self.awaited is not None:
            self.awaited.look(num_passes)
            if self._state == "gradient" and not (self.outside is not None and self.outside.were_loaded):
                self.awaited.check(has_batches=self._own is None)

    @property
    def rates(self) -> int:
        """A digest of the learning rates to 6 digits, as processors may differ in the last ones."""
        if self.rates_may_differ:
            return 0
        rates = [f"{float(group['lr']):.6g}" for group in self._optimizer.param_groups if "lr" in group]
        return zlib.crc32(repr(rates).encode())

    def _weigh_anew(self) -> int:
        """After a hand-out: weighs the next pass by its own samples; returns 0."""
        self._weighed += self.samples
        self.samples = 0
        return 0

    def _is_left_out(self) -> bool:
        """Whether GradScaler leaves this update out, while the round that it belongs to takes place.

        Where workers average gradients, one infinity is in the mean of all: they decide alike.
        """
        if self._g_is_mine:
            return not is_finite(self.g)
        return self._overflowed

    def _hide_gradients(self, others: Sequence[nn.Parameter] = ()) -> None:
        self._kept = {p: p.grad for p in (*self.binding.parameters, *others)}
        for parameter in self._kept:
            parameter.grad = None

    def _show_gradients(self, of: Sequence[nn.Parameter] | None) -> None:
        """Restores hidden gradients; `of`: only those of the optimizer that has stepped, if others have yet to."""
        if self._kept is not None:
            for parameter in self._kept if of is None else self._kept.keys() & set(of):
                parameter.grad = self._kept[parameter]

    def _begin_without_batch(self, samples: int = 0) -> None:
        """The loop has begun a step by itself."""
        raise NotImplementedError

    def _weigh(self) -> int:
        """Counts the samples of batches that the loop has fetched by itself: a gradient never weighs 0.

        Returns:
            how many have not been counted before.
        """
        if self._own is None:
            return 0
        before, self.samples = self.samples, self._told_samples or max(1, self._own.samples)
        return self.samples - before

    def _on_gradient(self, index: int) -> None:
        """Backward has added to a parameter's gradient."""
        if self._ahead_at is not None and self._own is not None:  # the loop has called nothing of the model so far
            self._own.see_pass()
            self._begin_without_batch()
        if self._ready is None or self._state != "gradient":
            return
        if self.accumulates or self._waits_for_step:
            self._handed_out = False
            return
        assert self._buckets is not None
        if self._end_of_pass() is None:
            end = partial(self._end_of_backward)
            self._end_of_pass = weakref.ref(end)
            self._weigh()
            self._missing = None
            self._loss_scale = scale_of_pass()
            if self._loss_scale is not None:
                self.scaled = True
                self._check_scalable()
            self._buckets.begin(self._pass_on)
            self._call_after_backward(end)
        if self._pending is None or not self._pending.is_pending(self.binding.parameters[index]):
            self._complete(index)

    def _complete(self, index: int) -> None:
        """A parameter's gradient is what it will be when this backward pass has ended."""
        if self._end_of_pass() is None or self._buckets is None:
            return
        waits_for_end = self.repeats or self._slowness is not None  # of the pass, or of a slow worker's time
        if self._buckets.under_way and not waits_for_end:
            self._buckets.complete(index)

    def _hand_out_all(self) -> None:
        """The step comes without a backward pass that handed out: all gradients are there."""
        assert self._buckets is not None
        assert self._ready is not None
        self._missing = self._loss_scale = None  # GradScaler has unscaled the gradients by now
        self._buckets.begin(self._pass_on)
        self._end_of_backward()

    def _pass_on(self, bucket: torch.Tensor) -> None:
        """Hands out a bucket in the loss's own units: the workers' scales may differ, and change from step to step."""
        assert self._ready is not None
        if self._loss_scale is not None:
            bucket.div_(self._loss_scale)
        self._ready(bucket)

    def _check_scalable(self) -> None:
        if self.binding.dtype == torch.float16:
            raise UsageError(
                "GradScaler cannot unscale gradients in float16: keep the parameters in float32 and compute under"
                " torch.autocast, or leave GradScaler out."
            )

    def _end_of_backward(self) -> None:
        assert self._buckets is not None
        assert self._g is not None
        if self._pending is not None:
            self._pending.finish()
        self._end_of_pass = _over
        if self._slowness is not None:
            self._slowness.sleep(self._gradient_started_s)
        self._gradient_ended_s = self._now_s()  # what follows are waits
        if self.shares is not None:  # and between several passes
            self._waited_within_s = sum(one.waited_s for one in self._waits)
        if self.repeats:  # but shards have gradients of other workers' rows
            self.binding.leave_out(tuple(own for own in self.ranges if own[0] < self.binding.cut_from))
        self._buckets.complete_all()
        if self._finish is not None:
            self._finish()
        if self._loss_scale is not None:
            self._g.mul_(self._loss_scale)  # which GradScaler divides by, in its step or before
        self.binding.bind_gradients(self._g, self.missing)
        self._g_version, self._g_missing = self._g._version, self.missing
        self._handed_out = True

    @property
    def has_handed_out(self) -> bool:
        """Whether the gradients are what came back from the others."""
        return self._handed_out

    @property
    def has_changed_gradients(self) -> bool:
        """Whether the loop has changed, replaced or removed gradients since the others returned them."""
        if not self._handed_out or self._g is None:
            return False
        gradients = [None if p.grad is None else p.grad.data_ptr() for p in self.binding.parameters]
        views = zip(self.binding.views(self._g), self.ranges, strict=True)
        returned = [None if own in self._g_missing else view.data_ptr() for view, own in views]
        return self._g._version != self._g_version or gradients != returned

    def accept_gradients(self) -> None:
        """All workers have changed them alike."""
        if self._g is not None:
            self._g_version = self._g._version


def _over() -> Any:
    """No backward pass is under way."""
