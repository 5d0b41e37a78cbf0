"""Exchanges at the border between data parallelism and a cut layer: gathers, and their transposes in the backward pass.

Shapes: N workers in G groups of m; b rows on this worker, B in its group; f features, f / m of them a worker's part. Every
function returns sums of gradients per row, as one process would compute them, except for the weights': those are of the
mean of the group's losses, like those of a penalty on the weights in a loss.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.model_parallel.axes import Axis, exchanged, side_by_side
from paceline.optim.sharding import AxisShape


class Rows:
    """One forward pass of all workers together.

    Args:
        counts: each worker's rows; negative: rows of a repeated batch, which get no weight.
    """

    def __init__(self, counts: list[int], worker_id: int, parts: int, number: tuple[int, ...]) -> None:
        begins = [0, *accumulate(map(abs, counts))]
        group = AxisShape(parts).members(worker_id)
        self.number = number
        self.own = abs(counts[worker_id])  # rows of this worker
        self.first = begins[worker_id]  # its first row's number in the global batch, worker 0's rows first
        self.of_group = [abs(counts[worker]) for worker in group]  # rows of each worker of its group
        self._weights = [max(0, counts[worker]) for worker in group]
        self.total = sum(self._weights)  # weight of its group's rows: their number, except repeated ones
        self.first_of_group = begins[group.start]  # the number of the group's first row
        self._most = max(self.of_group)
        self._are_equal = min(self.of_group) == self._most

    def padded(self, own: torch.Tensor) -> torch.Tensor:
        """A worker's rows (own, ...) padded to the group's largest batch, so that all parts have the same length."""
        if len(own) == self._most:
            return own
        return torch.cat([own, own.new_zeros(self._most - len(own), *own.shape[1:])])

    def joined(self, stacked: torch.Tensor) -> torch.Tensor:
        """All workers' rows (total, ...), from the padded ones (parts, most, ...)."""
        if self._are_equal:
            return stacked.flatten(0, 1)
        return torch.cat([one[:rows] for one, rows in zip(stacked, self.of_group, strict=True)])

    def stacked(self, rows: torch.Tensor) -> torch.Tensor:
        """The group's rows (total, ...) by worker, padded (parts, most, ...)."""
        if self._are_equal:
            return rows.view(len(self.of_group), self._most, *rows.shape[1:])
        return torch.stack([self.padded(one) for one in rows.split(self.of_group)])

    def weights(self, like: torch.Tensor) -> torch.Tensor | float:
        """The weight of each of the group's rows (total, 1), or one for all, in the mean of its workers' losses.

        Each worker's loss is the mean over its rows, and is weighted by their weights.
        """
        if self._are_equal and self._weights == self.of_group:
            return 1 / len(self.of_group)
        factors = torch.tensor(self._weights, dtype=like.dtype) / max(1, self.total)
        return factors.repeat_interleave(torch.tensor(self.of_group)).unsqueeze(1).to(like.device)


def gather_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(b, f) -> (B, f): all rows of the group. Backward: reduce-scatter, each worker gets its own rows' sum."""
    return exchanged(x, partial(_all_rows, axis, rows), partial(_own_rows, axis, rows))


def scatter_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(B, f) -> (b, f): the sum of all workers' partial results, own rows of it. Backward: all-gather of the rows."""
    return exchanged(x, partial(_own_rows, axis, rows), partial(_all_rows, axis, rows))


def gather_features(x: Tensor, axis: Axis) -> Tensor:
    """(B, f / m) -> (B, f): all features of the group's rows. Backward: reduce-scatter over the features."""
    return exchanged(
        x, lambda x: side_by_side(axis.all_gather(x)), lambda g: axis.reduce_scatter(_by_features(g, axis))
    )


def swap_to_rows(x: Tensor, axis: Axis, rows: Rows) -> Tensor:
    """(B, f / m) -> (b, f): own rows with all features, by all-to-all. Backward: the all-to-all the other way round."""
    return exchanged(
        x,
        lambda x: side_by_side(axis.all_to_all(rows.stacked(x)))[: rows.own],
        lambda g: rows.joined(axis.all_to_all(_by_features(rows.padded(g), axis))),
    )


def part_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    """X W^T + b on the group's rows (B, f); the weight's gradient is that of the mean of the group's losses."""
    return _PartLinear.apply(x, weight, bias, rows)  # type: ignore[return-value]


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


def _all_rows(axis: Axis, rows: Rows, x: Tensor) -> Tensor:
    return rows.joined(axis.all_gather(rows.padded(x)))


def _own_rows(axis: Axis, rows: Rows, x: Tensor) -> Tensor:
    return axis.reduce_scatter(rows.stacked(x))[: rows.own]


def _by_features(x: Tensor, axis: Axis) -> Tensor:
    """(rows, f) -> (m, rows, f / m)."""
    return x.view(len(x), axis.size, x.shape[1] // axis.size).transpose(0, 1)
