"""Splits a batch into micro-batches, joins their outputs, and checks that the model computes the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.graph.capture import in_training_mode
from paceline.model_parallel.graph.trace import Traced, inputs_unchanged, tensors_in
from paceline.system.torch_internals import tree_map
from paceline.system.torch_random import torch_state, torch_undisturbed

_MOST_WHOLE = 4  # inputs as long as the batch that are tried whole


def mapped(value: Any, change: Any) -> Any:
    """Applies `change` to every tensor, also inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    return type(value)(mapped(one, change) for one in value) if isinstance(value, tuple | list) else value


def micro_batch(arguments: Any, cut: Sequence[bool], m: int, number: int) -> Any:
    """The m-th of `number` micro-batches; `cut` tells of each tensor whether it is cut, or whole in each of them."""
    flags = iter(cut)
    return mapped(arguments, lambda one: one.chunk(number)[m] if next(flags) else one)


def joined(outs: list[Any]) -> Any:
    """Joins the outputs of all micro-batches into one; averages tensors without dimensions."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        return torch.cat(parts) if parts[0].dim() else torch.stack(parts).mean()

    return tree_map(join, *outs)


def inputs_to_cut(model: nn.Module, traced: Traced, arguments: Mapping[str, Any], number: int) -> tuple[bool, ...]:
    """For each tensor of the batch, whether each of its rows is a sample, so that it can be cut into micro-batches.

    Cuts all tensors with as many rows as the first one. If that changes results or gradients of a copy of the model, for
    example because a table happens to have as many rows as the batch, some of them stay whole.

    Raises:
        UsageError: every choice changes results or gradients, or the model changes buffers, as it would per micro-batch.
    """
    found = list(tensors_in(arguments))
    size = next((len(one) for one in found if one.dim()), 0)
    if not size or size % number:
        raise UsageError(
            f"Inputs of length {size} cannot be cut into {number} micro-batches of one size: choose another number."
        )
    twin = copy.deepcopy(model)
    before = [one.clone() for one in twin.buffers()]
    with in_training_mode(twin), torch_undisturbed(), torch.enable_grad():
        with inputs_unchanged(model, arguments):
            twin(**arguments)
        if all(map(torch.equal, before, twin.buffers())):
            randoms = [one for one in traced.nodes if one.is_random]
            for one in randoms:
                twin.get_submodule(one.path).eval()
            state = torch_state()
            whole = _results(twin, twin(**arguments))
            if not torch.equal(state, torch_state()):
                raise UsageError(
                    f"{type(model).__name__} draws random numbers in evaluation mode, too ({randoms[0].line}), so results "
                    "of a batch cannot be compared with those of its micro-batches: place it for latency."
                )
            can = [at for at, one in enumerate(found) if one.dim() and len(one) == size]
            for left_out in (kept for few in range(min(len(can), _MOST_WHOLE)) for kept in combinations(can, few)):
                cut = tuple(at in can and at not in left_out for at in range(len(found)))
                with suppress(Exception):  # user code may raise anything on shapes that do not fit
                    outs = [twin(**micro_batch(arguments, cut, m, number)) for m in range(number)]
                    (out, gradients), share = _results(twin, joined(outs)), rounding(traced)
                    if are_close(whole[0], out, share) and gradients_are_close(whole[1], gradients, share):
                        return cut
    raise UsageError(
        f"{type(model).__name__} computes a different result from a batch than from its micro-batches, as batch norm and "
        "sums over samples do: place it for latency, without micro-batches, or leave the sum to the loss."
    )


def weighted_sum(out: Any) -> torch.Tensor | None:
    """A loss that weights all elements of the outputs differently; None: they have no gradient."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        (one * torch.rand(one.shape, generator=draw, dtype=torch.float64).to(one.dtype)).sum()
        for one in tensors_in(out)
        if one.requires_grad and one.is_floating_point()
    ]
    return torch.stack([one.double() for one in parts]).sum() if parts else None


def rounding(traced: Traced) -> float:
    """The largest relative difference that another order of sums explains, by the least precise type of the operations."""
    types = {one.dtype for one in traced.nodes}
    return 3e-2 if types & {"bfloat16", "float16"} else 1e-4 if "float32" in types else 1e-9


def are_close(one: Any, other: Any, rounding: float, *, least: float = 0.0) -> bool:
    """Whether tensors are equal up to a share of their largest value, and at least up to `least`."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(a.shape == b.shape and _is_close(_double(a), _double(b), rounding, least) for a, b in pairs)


def gradients_are_close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], rounding: float) -> bool:
    """As `are_close`, for all gradients of a model.

    That of a bias before batch norm, or of attention's keys, is what rounding leaves of zero, and differs between orders of
    sums. So all may differ by `rounding` times a hundredth of the largest gradient.
    """
    largest = max((_largest(_double(g)) for g in one), default=0.0)
    return are_close(one, other, rounding, least=rounding * largest / 100)


def _double(value: torch.Tensor) -> torch.Tensor:
    value = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _results(model: nn.Module, out: Any) -> tuple[Any, Sequence[torch.Tensor]]:
    """Outputs, and gradients of their weighted sum."""
    loss, trained = weighted_sum(out), [one for one in model.parameters() if one.requires_grad]
    if loss is None or not trained:
        return out, []
    return out, torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)


def _is_close(a: torch.Tensor, b: torch.Tensor, rounding: float, least: float) -> bool:
    return torch.allclose(a, b, rtol=0, atol=max(rounding * _largest(a), least), equal_nan=True)


def _largest(value: torch.Tensor) -> float:
    return value.nan_to_num().abs().max().item() if value.numel() else 0.0
