"""Layer computations and losses on a worker's parts of tensors, one autograd function each, without DTensor.

Training minimises the mean of the losses of all workers of the mesh; each loss is a function of that worker's tensors.
Along an axis on which a tensor is cut, its gradient here is that of the sum of the losses; on axes where all have the same
tensor, that of their mean. So a user-defined loss may be of either kind; functions between the two multiply or divide by
the workers, and `as_used` divides the gradient of a parameter that is cut over a grid, where all tensors between layers are
cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.model_parallel.axes import Axis, exchanged
from paceline.model_parallel.placement import part_of
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.products import multiply, multiply_transposed, weight_gradient


class ColumnLinear(torch.autograd.Function):
    """On a line: whole inputs, own outputs; the input's gradient is summed over the line (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gy = gradients[0].contiguous() / ctx.axis.size
        gx = started = None
        if ctx.needs_input_grad[0]:
            gx = gy @ weight
            started = ctx.axis.start_all_reduce(gx)
        gw = _tokens(gy).T @ _tokens(x) if ctx.needs_input_grad[1] else None
        gb = _tokens(gy).sum(0) if ctx.needs_input_grad[2] else None
        if started is not None:
            started.wait()
        return gx, gw, gb, None


class RowLinear(torch.autograd.Function):
    """On a line: own inputs, whole outputs, summed over the line (Megatron's g); the bias is added once, afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.size = axis.size
        y = F.linear(x, weight)
        axis.start_all_reduce(y).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gy = gradients[0]
        gx = gy @ weight * ctx.size if ctx.needs_input_grad[0] else None
        gw = _tokens(gy).T @ _tokens(x) if ctx.needs_input_grad[1] else None
        gb = _tokens(gy).sum(0) if ctx.needs_input_grad[2] else None
        return gx, gw, gb, None


class GridLinear(torch.autograd.Function):
    """On a grid: own part of inputs and outputs; the weight (outputs / q, inputs / q)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh = mesh
        y = multiply(_tokens(x), weight, mesh, turned=True)
        if bias is not None:
            y += bias
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, weight), gy = ctx.saved_tensors, _tokens(gradients[0])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gx = multiply_transposed(gy, weight, ctx.mesh, turned=True).unflatten(0, x.shape[:-1]) if needs_x else None
        gw = weight_gradient(_tokens(x), gy, ctx.mesh, turned=True) if needs_weight else None
        return gx, gw, gy.sum(0) if needs_bias else None, None


class GridLogits(torch.autograd.Function):
    """On a grid: products with the rows of an embedding's table (vocabulary / q, hidden / q), a tied output layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x, table)
        ctx.mesh = mesh
        return multiply_transposed(_tokens(x), table, mesh, turned=False).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, table), gy = ctx.saved_tensors, _tokens(gradients[0])
        needs_x, needs_table, _ = ctx.needs_input_grad
        gx = multiply(gy, table, ctx.mesh, turned=False).unflatten(0, x.shape[:-1]) if needs_x else None
        return gx, weight_gradient(gy, _tokens(x), ctx.mesh, turned=False) if needs_table else None, None


class GridNorm(torch.autograd.Function):
    """Layer normalisation of features that are cut over an axis: two numbers per token are summed, in each direction.

    The sums are in float64, so a variance as their difference keeps float32 precision.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, axis: Axis, epsilon: float) -> Tensor:
        features = x.shape[-1] * axis.size
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square()
        sums = torch.stack((x.sum(-1, dtype=torch.float64), squares))
        axis.start_all_reduce(sums).wait()
        mean, square = sums / features
        inverse = ((square - mean.square()).clamp_(min=0) + epsilon).rsqrt_()
        normal = (x - mean[..., None].to(x.dtype)) * inverse[..., None].to(x.dtype)
        ctx.save_for_backward(normal, inverse.to(x.dtype), gain)
        ctx.axis = axis
        return normal * gain + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normal, inverse, gain = ctx.saved_tensors
        gy = gradients[0]
        ggain = _tokens(gy * normal).sum(0) if ctx.needs_input_grad[1] else None
        gbias = _tokens(gy).sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, ggain, gbias, None, None
        g = gy * gain
        sums = torch.stack((g.sum(-1), (g * normal).sum(-1)))
        ctx.axis.start_all_reduce(sums).wait()
        mean, projection = sums / (gain.numel() * ctx.axis.size)
        gx = (g - mean[..., None] - normal * projection[..., None]) * inverse[..., None]
        return gx, ggain, gbias, None, None


class LineEmbedding(torch.autograd.Function):
    """On a line: rows of the vocabulary that another worker has count as zero, and the line sums them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, axis: Axis) -> Tensor:
        local, is_elsewhere = _local_tokens(tokens, len(table), axis)
        ctx.save_for_backward(local, is_elsewhere)
        ctx.rows = len(table)
        x = table[local].masked_fill_(is_elsewhere[..., None], 0)
        axis.start_all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        local, is_elsewhere = ctx.saved_tensors
        gx = gradients[0].masked_fill(is_elsewhere[..., None], 0)
        gt = gx.new_zeros(ctx.rows, gx.shape[-1]).index_add_(0, local.flatten(), _tokens(gx))
        return None, gt, None


class GridEmbedding(torch.autograd.Function):
    """On a grid: the table (vocabulary / q, hidden / q) of the column is gathered, and its gradient scattered back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, mesh: Mesh) -> Tensor:
        _check_tokens(tokens, len(table) * mesh.axes["row"].size)
        ctx.save_for_backward(tokens)
        ctx.mesh, ctx.rows = mesh, len(table)
        return mesh.axes["row"].all_gather(table).flatten(0, 1)[tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (tokens,), axis = ctx.saved_tensors, ctx.mesh.axes["row"]
        gx = _tokens(gradients[0])
        gt = gx.new_zeros(axis.size * ctx.rows, gx.shape[-1]).index_add_(0, tokens.flatten(), gx)
        return None, axis.reduce_scatter(gt.view(axis.size, ctx.rows, -1)), None


class VocabularyLoss(torch.autograd.Function):
    """Cross entropy of logits with a sharded vocabulary: the mean over the whole batch; each worker gets its gradient part.

    For each token, the largest logit, the sum of exponentials and the target's logit are gathered; logits are not. Targets are
    gathered with them to detect workers that train on different samples.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
        axis, ctx.shape = mesh.hidden, logits.shape
        logits, targets = _tokens(logits), targets.flatten()
        largest = axis.all_gather(logits.amax(-1)).amax(0)
        shifted = logits - largest[:, None]
        local, is_elsewhere = _local_tokens(targets, logits.shape[-1], axis)
        target = shifted.gather(1, local[:, None])[:, 0].masked_fill_(is_elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), target, targets.to(target.dtype)))
        axis.start_all_reduce(sums).wait()
        if not torch.equal(sums[2], targets.to(target.dtype) * axis.size):
            raise UsageError(
                "Workers that share samples have different targets: give all workers the same batches, with samplers "
                "that have the same seed."
            )
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, is_elsewhere)
        ctx.factor = axis.size / len(targets)
        loss = (sums[0].log() - sums[1]).mean() / mesh.shape.batch_parts
        return mesh.sum_over_batch(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, local, is_elsewhere = ctx.saved_tensors
        here = (~is_elsewhere).to(probabilities.dtype)
        gradient = probabilities.scatter_add(1, local[:, None], -here[:, None])
        return gradient.mul_(gradients[0] * ctx.factor).view(ctx.shape), None, None


def cross_entropy(logits: Tensor, targets: Tensor, mesh: Mesh) -> Tensor:
    """The mean over the whole batch, the same number on every worker.

    Args:
        logits: (..., vocabulary), cut over the vocabulary, of this worker's part of the batch.
        targets: (...), of that part; each is a token of the whole vocabulary.
        mesh: the workers.
    """
    if mesh.shape.workers == 1:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return apply(VocabularyLoss, logits, targets, mesh)


def whole_features(x: Tensor, features: int, mesh: Mesh) -> Tensor:
    """Gathers all outputs of a layer, for a loss of several at once, such as PyTorch's cross entropy.

    Costs: an all-gather along the line or the row, and no message in the backward pass; nothing if `x` is whole.

    Args:
        x: (..., features), or this worker's part of the last dimension.
        features: whole.
        mesh: the workers.

    Raises:
        UsageError: it is neither.
    """
    if x.shape[-1] == features:
        return x
    if x.shape[-1] * mesh.hidden.size != features:
        raise UsageError(
            f"{x.shape[-1]} features of {features} are neither all nor this worker's part: give whole_features a layer's"
            " output, and the number of outputs that the layer was built with."
        )
    axis = mesh.hidden
    return exchanged(
        x, lambda x: torch.cat(axis.all_gather(x).unbind(), -1), lambda g: part_of(g, axis, -1) * axis.size
    )


def as_used(parameter: Tensor, parts: int) -> Tensor:
    """A parameter cut into several parts over a grid, as a layer uses it; other terms of a loss use it directly."""
    used = parameter.view_as(parameter)
    if used.requires_grad:
        used.register_hook(lambda gradient: gradient / parts)
    return used


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """The output of a function with one tensor."""
    output = function.apply(*arguments)
    assert isinstance(output, Tensor)
    return output


def _tokens(x: Tensor) -> Tensor:
    """(..., features) -> (tokens, features)."""
    return x.reshape(-1, x.shape[-1])


def _local_tokens(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Indices in this worker's part of the vocabulary, and a mask of tokens in another's part, whose index is then 0."""
    _check_tokens(tokens, rows * axis.size)
    local = tokens - axis.index * rows
    is_elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(is_elsewhere, 0), is_elsewhere


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise UsageError(
            f"A token is outside the vocabulary of {vocabulary}; the tokens go from {int(tokens.min())} to "
            f"{int(tokens.max())}: leave out padding and tokens to ignore, or enlarge the vocabulary."
        )
