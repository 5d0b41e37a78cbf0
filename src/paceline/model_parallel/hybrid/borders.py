"""Exchanges at the border between data parallelism and a cut layer: gathers, and their transposes in the backward pass.

Shapes: N workers in G groups of m; b rows on this worker, B in its group; f features, f / m of them a worker's part. Every
function returns sums of gradients per row, as one process would compute them, except for the weights': those are of the
mean of the group's losses, like those of a penalty on the weights in a loss.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.model_parallel.axes import Axis
from paceline.model_parallel.hybrid.rows import Rows

__all__ = ["gather_features", "gather_rows", "part_linear", "scatter_rows", "swap_to_rows"]


def gather_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(b, f) -> (B, f): all rows of the group. Backward: reduce-scatter, each worker gets its own rows' sum."""
    return _GatherRows.apply(x, axis, rows)  # type: ignore[return-value]


def gather_features(x: Tensor, axis: Axis) -> Tensor:
    """(B, f / m) -> (B, f): all features of the group's rows. Backward: reduce-scatter over the features."""
    return _GatherFeatures.apply(x, axis)  # type: ignore[return-value]


def swap_to_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(B, f / m) -> (b, f): own rows with all features, by all-to-all. Backward: the all-to-all the other way round."""
    return _SwapToRows.apply(x, axis, rows)  # type: ignore[return-value]


def scatter_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(B, f) -> (b, f): the sum of all workers' partial results, own rows of it. Backward: all-gather of the rows."""
    return _ScatterRows.apply(x, axis, rows)  # type: ignore[return-value]


def part_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    """X W^T + b on the group's rows (B, f); the weight's gradient is that of the mean of the group's losses."""
    return _PartLinear.apply(x, weight, bias, rows)  # type: ignore[return-value]


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: Rows) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        return _no_view(rows.joined(axis.all_gather(rows.padded(x))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _own_rows(gradients[0], ctx.axis, ctx.rows), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: Rows) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        return _no_view(_own_rows(x, axis, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.rows.joined(ctx.axis.all_gather(ctx.rows.padded(gradients[0]))), None, None


class _GatherFeatures(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x).transpose(0, 1).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        axis = ctx.axis
        pieces = gradients[0].view(len(gradients[0]), axis.size, gradients[0].shape[1] // axis.size).transpose(0, 1)
        return axis.reduce_scatter(pieces), None


class _SwapToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: Rows) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        taken = axis.all_to_all(rows.stacked(x))  # (parts, most, f / m): of every worker's features, own rows
        return _no_view(taken.transpose(0, 1).flatten(1)[: rows.own])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        axis, rows = ctx.axis, ctx.rows
        own = rows.padded(gradients[0])
        pieces = own.view(len(own), axis.size, own.shape[1] // axis.size).transpose(0, 1)
        return rows.joined(axis.all_to_all(pieces)), None, None


class _PartLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        weighed = gradient * ctx.rows.weights(gradient)
        of_x = gradient.mm(weight) if ctx.needs_input_grad[0] else None
        of_bias = weighed.sum(0) if ctx.has_bias else None
        return of_x, weighed.t().mm(x), of_bias, None


def _own_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    return axis.reduce_scatter(rows.stacked(x))[: rows.own]


def _no_view(x: Tensor) -> Tensor:
    """Copies views: autograd forbids in-place changes, such as nn.ReLU(inplace=True)'s, of views that a function returns."""
    return x.clone() if x._base is not None else x
