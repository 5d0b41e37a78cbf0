"""Sums of gradients along the axes on which workers have samples of their own: in buckets, while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.tensor.axes import Axis, Started
from paceline.model_parallel.tensor.placement import Placement

__all__ = ["GradientSums", "SumsOnTheWay", "WatchesGradients"]

_after_backward: Any = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore


class WatchesGradients:
    """What layers tell of the parameters that they use.

    Args:
        axes: of the mesh.
    """

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        self._axes = axes
        self._watched: dict[int, tuple[weakref.ref[nn.Parameter], Placement]] = {}

    def watch(self, parameter: nn.Parameter, placement: Placement) -> None:
        """From now on its gradients are sums; layers call it whenever they use a parameter, as copies lose their hooks.

        Raises:
            UsageError: another layer uses it as if it lay otherwise on the mesh.
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
        self._watched[id(parameter)] = (weakref.ref(parameter), placement)
        axes = tuple(name for name in placement.summed if self._axes[name].size > 1)
        if axes:
            self._sum(parameter, axes)

    def _sum(self, parameter: nn.Parameter, axes: tuple[str, ...]) -> None:
        raise NotImplementedError


class SumsOnTheWay(WatchesGradients):
    """Makes gradients sums before they are added to `parameter.grad`: whatever looks at gradients within backward sees sums.

    Costs: an all-reduce along each axis for each parameter with samples of its own there, waited for within backward.
    """

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        super().__init__(axes)
        self._hooks: list[Any] = []

    def _sum(self, parameter: nn.Parameter, axes: tuple[str, ...]) -> None:
        def total(gradient: Tensor) -> Tensor:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            for name in axes:
                self._axes[name].start_all_reduce(gradient).wait()
            return gradient

        self._hooks.append(parameter.register_hook(total))

    def remove(self) -> None:
        """From now on they are this worker's own."""
        while self._hooks:
            self._hooks.pop().remove()


class GradientSums(WatchesGradients):
    """Makes `parameter.grad` the gradient of the whole batch on every worker, before `backward()` returns.

    It adds what this backward pass has given, so gradients of several passes accumulate. Matrices, which are partial along
    the depth only, leave as soon as a bucket is full; vectors follow together at the end.

    Args:
        axes: of the mesh.
        bucket_bytes: of gradients in one all-reduce, at least.
    """

    def __init__(self, axes: Mapping[str, Axis], bucket_bytes: int = 25 << 20) -> None:
        super().__init__(axes)
        self._bucket_bytes = bucket_bytes
        self._earlier: dict[int, Tensor] = {}  # by parameter: gradients of earlier backward passes
        self._waiting: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        self._on_their_way: list[tuple[list[nn.Parameter], Tensor, Started]] = []

    def _sum(self, parameter: nn.Parameter, axes: tuple[str, ...]) -> None:
        parameter.register_hook(self._before(weakref.ref(parameter)))
        parameter.register_post_accumulate_grad_hook(lambda one: self._after(one, axes))

    def _before(self, reference: weakref.ref[nn.Parameter]) -> Callable[[Tensor], None]:
        def set_aside(_: Tensor) -> None:
            if (parameter := reference()) is not None and parameter.grad is not None:
                self._earlier[id(parameter)] = parameter.grad
                parameter.grad = None

        return set_aside

    def _after(self, parameter: Tensor, axes: tuple[str, ...]) -> None:
        assert isinstance(parameter, nn.Parameter)
        _after_backward(self._finish)  # the first of these calls does everything
        bucket = self._waiting.setdefault((axes, parameter.dtype), [])
        if any(one is parameter for one in bucket):  # from a backward pass that has failed
            self._clear()
            bucket = self._waiting.setdefault((axes, parameter.dtype), [])
        bucket.append(parameter)
        if len(axes) == 1 and sum(_gradient(one).nbytes for one in bucket) >= self._bucket_bytes:
            self._send(bucket, axes)
            bucket.clear()

    def _send(self, parameters: list[nn.Parameter], axes: tuple[str, ...]) -> None:
        flat = torch.cat([_gradient(one).flatten() for one in parameters])
        for name in axes[:-1]:
            self._axes[name].start_all_reduce(flat).wait()
        self._on_their_way.append((list(parameters), flat, self._axes[axes[-1]].start_all_reduce(flat)))

    def _finish(self) -> None:
        """At the end of the backward pass, when every parameter has what its own samples give."""
        try:
            for (axes, _), parameters in self._waiting.items():
                if parameters:
                    self._send(parameters, axes)
            for parameters, flat, started in self._on_their_way:
                started.wait()
                parts = flat.split([one.numel() for one in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    earlier = self._earlier.pop(id(parameter), None)
                    total = part.view_as(parameter)
                    parameter.grad = total if earlier is None else earlier.add_(total)
        finally:
            self._clear()

    def _clear(self) -> None:
        self._waiting.clear()
        self._on_their_way.clear()
        self._earlier.clear()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
