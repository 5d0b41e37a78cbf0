"""Means of gradients along the axes on which workers have different samples: in buckets, during the backward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.axes import Axis
from paceline.model_parallel.placement import Placement
from paceline.ports.ports import Handle
from paceline.system.torch_internals import call_after_backward


class _Pass:
    """A backward pass; only the pass itself keeps this alive until it has ended or failed."""


class _Sent(NamedTuple):
    parameters: tuple[nn.Parameter, ...]
    flat: Tensor
    started: Handle
    workers: int


class GradientMeans:
    """Sets `parameter.grad` to the mean over the workers' losses, on every worker, before `backward()` returns.

    Backward itself adds zeros to the gradients that are means; local gradients go into buckets, whose means are added when
    they arrive. So gradients of several passes accumulate, and PyTorch's version counter, which hooks of the parameters may
    have noted, does not change. Matrices, which are partial only along the depth, are sent as soon as a bucket is full;
    vectors are sent together at the end. Implements `PendingGradients`.

    Costs: an all-reduce for each bucket and axis; memory for the gradients in transit.
    """

    def __init__(self, axes: Mapping[str, Axis], bucket_bytes: int = 25 << 20) -> None:
        self._axes = axes
        self._bucket_bytes = bucket_bytes
        self._watched: dict[int, tuple[weakref.ref[nn.Parameter], Placement]] = {}
        self._hooks: list[Any] = []
        self._waiting: dict[tuple[tuple[str, ...], torch.dtype], dict[nn.Parameter, Tensor]] = {}
        self._sent: list[_Sent] = []
        self._begun: set[Tensor] = set()  # parameters to whose `grad` this backward pass has added zeros
        self._pass: Callable[[], _Pass | None] = _no_pass  # the pass that these gradients belong to
        self.completed: list[
            Callable[[nn.Parameter], None]
        ] = []  # called with a parameter once its gradient is the mean

    def watch(self, parameter: nn.Parameter, placement: Placement) -> None:
        """From now on its gradients are means; layers call it at each use of a parameter, as copies lose their hooks.

        Raises:
            UsageError: another layer uses it with another placement.
        """
        reference, before = self._watched.get(id(parameter), (None, None))
        if reference is not None and reference() is parameter:
            if before != placement:
                raise UsageError(
                    "Two layers share a parameter that they cut in different ways: tie an output layer to an embedding with"
                    " `embedding.logits(x)`, or give each layer a parameter of its own."
                )
            return
        if not parameter.requires_grad:
            return
        own = weakref.ref(parameter)
        self._watched[id(parameter)] = (own, placement)
        if axes := self._averaged(placement):
            self._hooks.append(parameter.register_hook(lambda gradient: self._take(own, gradient, axes)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._begun.add))

    def is_pending(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is a mean, which backward does not compute at first."""
        reference, placement = self._watched.get(id(parameter), (None, None))
        return reference is not None and reference() is parameter and bool(placement and self._averaged(placement))

    def finish(self) -> None:
        """At the end of the backward pass, when every parameter has its local gradient; idempotent."""
        try:
            for (axes, _), bucket in self._waiting.items():
                if bucket:
                    self._send(axes, bucket)
            self._receive()
        finally:
            self._clear()

    def remove(self) -> None:
        """From now on gradients are local."""
        self.completed.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _end(self, began: _Pass) -> None:
        if self._pass() is began:
            self.finish()

    def _averaged(self, placement: Placement) -> tuple[str, ...]:
        return tuple(name for name in placement.averaged if self._axes[name].size > 1)

    def _take(self, reference: weakref.ref[nn.Parameter], gradient: Tensor, axes: tuple[str, ...]) -> Tensor | None:
        """Before backward adds this pass' gradient to the parameter's; returns what to add instead."""
        parameter = reference()
        if parameter is None:
            return None
        if self._pass() is None:  # the first of this pass; leftovers of another one failed with it
            self._clear()
            began = _Pass()
            self._pass = weakref.ref(began)
            call_after_backward(partial(self._end, began))
        bucket = self._waiting.setdefault((axes, gradient.dtype), {})
        waiting = bucket.get(parameter)  # of a pass within this one, as checkpointing makes
        bucket[parameter] = gradient if waiting is None else waiting + gradient
        if len(axes) == 1 and sum(one.nbytes for one in bucket.values()) >= self._bucket_bytes:
            self._receive()  # what went before has had the time that this one took to fill
            self._send(axes, bucket)
        return gradient.new_zeros(()).expand_as(gradient)

    def _send(self, axes: tuple[str, ...], bucket: dict[nn.Parameter, Tensor]) -> None:
        flat = torch.cat([one.flatten() for one in bucket.values()])
        *before, last = (self._axes[name] for name in axes)
        for axis in before:
            axis.start_all_reduce(flat).wait()
        workers = math.prod(self._axes[name].size for name in axes)
        self._sent.append(_Sent(tuple(bucket), flat, last.start_all_reduce(flat), workers))
        bucket.clear()

    @torch.no_grad()
    def _receive(self) -> None:
        while self._sent:
            parameters, flat, started, workers = self._sent.pop(0)
            started.wait()
            flat /= workers
            for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
                if parameter.grad is None or parameter not in self._begun:
                    raise UsageError(
                        "torch.autograd.grad would return only this worker's part of a mean: call loss.backward(), "
                        "and take the gradients of parameters on a mesh from their `grad`."
                    )
                parameter.grad.data.add_(part.view_as(parameter))
                for call in self.completed:
                    call(parameter)

    def _clear(self) -> None:
        self._waiting.clear()
        self._sent.clear()
        self._begun.clear()
        self._pass = _no_pass


def _no_pass() -> None:
    return None
