"""The gradient of a loop's step: in the parameters, or in buckets that are handed out during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from paceline.loop.buckets import GradientBuckets, PendingGradients
from paceline.loop.loss_scales import scale_of_pass
from paceline.optim.flat import FlatBinding
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows
from paceline.ports.replica import OnBucket, OnEnd


class ParameterGradient:
    """A gradient that stays in the parameters; a program that reads it gets a copy as one vector.

    Attributes:
        takes_rows: whether the program takes sparse gradients as rows.
        rows: of the gradient that the program has read, whose elements are then all that it has; None: it has all elements.
        is_read: whether the program has read it in this step: it may have changed the vector.
        has_returned: whether the gradient is what came back from the other workers.
    """

    def __init__(self, binding: FlatBinding) -> None:
        self._binding = binding
        self._vector: torch.Tensor | None = None
        self._selected: torch.Tensor | None = None  # elements of the rows
        self._missing: Ranges | None = None
        self.takes_rows = self.is_read = self.has_returned = False
        self.rows: Rows | None = None

    def begin(self, missing: Ranges | None = None) -> None:
        """Begins another gradient; `missing`: the parameters that get none, if known."""
        self.is_read = self.has_returned = False
        self._missing = missing

    @property
    def vector(self) -> torch.Tensor:
        """Memory (P,) for the gradient as one vector, allocated at the first request."""
        if self._vector is None:
            self._vector = self._binding.zeros()
        return self._vector

    def read(self, *, weighs_nothing: bool) -> torch.Tensor:
        """The gradient as one vector (P,), or the elements of its rows, gathered when first read in a step."""
        if not self.is_read:
            self.is_read = True
            self.rows = self._binding.sparse_rows() if self.takes_rows and not weighs_nothing else None
            if self.rows is not None:
                self._selected, self._missing = self._binding.gather_rows(self.rows), ()
            elif weighs_nothing:
                self.vector.zero_()
            else:
                self._missing = self._binding.gather_gradients(self.vector)
        return self.vector if self.rows is None or self._selected is None else self._selected

    def write_back(self) -> None:
        """Copies the vector that the program has read, and may have changed, back to the parameters."""
        if self.is_read and self.rows is None:
            self._binding.scatter_gradients(self.vector, self.missing)

    def put(self, rows: Rows, g: torch.Tensor) -> None:
        """The gradient becomes `g` (count,), of these rows, if the program takes tables."""
        raise NotImplementedError

    def in_backward(self) -> type[BucketedGradient]:
        """The same kind of gradient, for programs that average it before `backward` returns."""
        return BucketedGradient

    @property
    def missing(self) -> Ranges:
        """The parameters without a gradient: on this worker, until the program sets what all have agreed on."""
        if self._missing is None:
            self._missing = self._find_missing()
        return self._missing

    @missing.setter
    def missing(self, ranges: Ranges | None) -> None:
        self._missing = ranges

    def _find_missing(self) -> Ranges:
        return self._binding.missing_gradients()

    @property
    def returned(self) -> torch.Tensor:
        """All elements that came back from the other workers."""
        return self.vector

    @property
    def has_changed(self) -> bool:
        """Whether the loop has changed, replaced or removed the gradient since the others returned it."""
        return False

    def accept_changes(self) -> None:
        """Accepts a change that all workers have made to the gradient."""

    def hand_out_rest(self) -> bool:
        """Hands out, before a step, the gradients that no backward pass has handed out; returns whether there were any."""
        return False

    def forget_program(self) -> None:
        """Drops the program's callbacks."""

    def close(self) -> None:
        """Stops watching the parameters."""


class Backward(Protocol):
    """The replica as `BucketedGradient` uses it during backward."""

    @property
    def adds_up(self) -> bool: ...
    @property
    def waits_for_end(self) -> bool: ...
    @property
    def repeats(self) -> bool: ...

    def wants_gradient(self) -> bool: ...
    def begin_pass(self, *, is_scaled: bool) -> None: ...
    def end_pass(self) -> None: ...
    def call_after_backward(self, end: Callable[[], None]) -> None: ...


class BucketedGradient(ParameterGradient):
    """A gradient that is handed out in buckets during backward; the parameters then hold the result."""

    def __init__(
        self, binding: FlatBinding, bucket_bytes: int, backward: Backward, pending: PendingGradients | None
    ) -> None:
        super().__init__(binding)
        self._backward = backward
        self._ready: Callable[[torch.Tensor], None] | None = None
        self._finish: Callable[[], None] | None = None
        self._loss_scale: torch.Tensor | None = None  # of the gradient that is handed out; None: it is not scaled
        self._end_of_pass: Callable[[], Any] = _over  # a weak reference: its target dies if the pass raises an error
        self._returned_version = 0  # PyTorch's count of changes of the vector when it came back
        self._returned_missing: Ranges = ()
        self._buckets = GradientBuckets(binding, self._in_buckets(), self._on_gradient, bucket_bytes)
        self._pending: PendingGradients | None = None
        if pending is not None:
            self.wait_for(pending)

    def _in_buckets(self) -> torch.Tensor | None:
        return self.vector

    def wait_for(self, pending: PendingGradients) -> None:
        numbers = {parameter: index for index, parameter in enumerate(self._binding.parameters)}
        self._pending = pending
        pending.completed.append(lambda parameter: self._complete(numbers[parameter]))

    def hand_to(self, ready: OnBucket, finish: OnEnd) -> None:
        """Sets the functions that receive each bucket, if there are any, and that run after the last one."""
        self._ready, self._finish = ready or (lambda bucket: None), finish

    def forget_program(self) -> None:
        self._ready = self._finish = None

    def close(self) -> None:
        self._buckets.remove()
        self._binding.release_gradients()
        del self._backward  # whose memory would otherwise wait for a garbage collection

    def _find_missing(self) -> Ranges:
        return self._buckets.missing

    @property
    def has_changed(self) -> bool:
        if not self.has_returned:
            return False
        gradients = [None if p.grad is None else p.grad.data_ptr() for p in self._binding.parameters]
        views = zip(self._binding.views(self.vector), self._binding.ranges, strict=True)
        returned = [None if own in self._returned_missing else view.data_ptr() for view, own in views]
        return self.vector._version != self._returned_version or gradients != returned

    def accept_changes(self) -> None:
        self._returned_version = self.vector._version

    def hand_out_rest(self) -> bool:
        if self._ready is None or self.has_returned:
            return False
        self._missing = self._loss_scale = None  # GradScaler has unscaled the gradients by now
        self._buckets.begin(self._pass_on)
        self._end_pass()
        return True

    def _on_gradient(self, index: int) -> None:
        if self._end_of_pass() is None and not self._begin_pass():
            return
        if self._pending is None or not self._pending.is_pending(self._binding.parameters[index]):
            self._buckets.complete(index)

    def _begin_pass(self) -> bool:
        """Backward has computed its first gradient; returns whether this pass hands it out."""
        if not self._backward.wants_gradient() or self._ready is None:
            return False
        if self._backward.adds_up:
            self.has_returned = False
            return False
        end = partial(self._end_pass)
        self._end_of_pass = weakref.ref(end)
        self._missing = None
        self._loss_scale = scale_of_pass()
        self._backward.begin_pass(is_scaled=self._loss_scale is not None)
        self._buckets.begin(self._pass_on, at_end=self._backward.waits_for_end)
        self._backward.call_after_backward(end)
        return True

    def _complete(self, index: int) -> None:
        """Other workers have added theirs to a parameter's gradient, perhaps of a pass that is not handed out."""
        if self._end_of_pass() is not None:
            self._buckets.complete(index)

    def _pass_on(self, bucket: torch.Tensor) -> None:
        """Hands out a bucket in the loss's own units: the workers' scales may differ, and change from step to step."""
        assert self._ready is not None
        if self._loss_scale is not None:
            bucket.div_(self._loss_scale)
        self._ready(bucket)

    def _end_pass(self) -> None:
        binding = self._binding
        if self._pending is not None:
            self._pending.finish()
        self._end_of_pass = _over
        self._backward.end_pass()
        if self._backward.repeats:  # but shards have gradients of other workers' rows
            binding.leave_out(tuple(own for own in binding.ranges if own[0] < binding.cut_from))
        self._buckets.complete_all()
        if self._finish is not None:
            self._finish()
        self._return()
        self.has_returned = True

    def _return(self) -> None:
        """Binds the exchanged gradient to the parameters, or copies it, if others' gradients wait for a step of their own."""
        vector, missing = self.vector, self.missing
        if self._loss_scale is not None:
            vector.mul_(self._loss_scale)  # which GradScaler divides by, in its step or before
        if self._backward.adds_up:
            self._binding.scatter_gradients(vector, missing)
        else:
            self._binding.bind_gradients(vector, missing)
        self._returned_version, self._returned_missing = vector._version, missing


def _over() -> Any:
    """No backward pass is under way."""
