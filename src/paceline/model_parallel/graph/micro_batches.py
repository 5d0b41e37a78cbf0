"""Splits a batch into micro-batches, joins their outputs, and checks that the model computes the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.graph.trace import Traced, tensors_in
from paceline.system.torch_internals import tree_map
from paceline.system.torch_random import torch_undisturbed

_CLOSE = 1e-3  # relative to an output's largest value; batch statistics differ by about 1 / sqrt(samples)


def mapped(value: Any, change: Any) -> Any:
    """Applies `change` to every tensor, also inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    return type(value)(mapped(one, change) for one in value) if isinstance(value, tuple | list) else value


def micro_batch(value: Any, m: int, number: int) -> Any:
    """The m-th of `number` micro-batches."""
    return mapped(value, lambda one: one.chunk(number)[m] if one.dim() else one)


def joined(outs: list[Any]) -> Any:
    """Joins the outputs of all micro-batches into one; averages numbers."""
    return tree_map(lambda *parts: torch.cat(parts) if parts[0].dim() else torch.stack(parts).mean(), *outs)


@torch.no_grad()
def check_micro_batches(model: nn.Module, traced: Traced, arguments: Mapping[str, Any], number: int) -> None:
    """Compares the output of a copy of the model for a batch with that for its micro-batches.

    Raises:
        UsageError: they differ, or the model changes buffers, which it would do once per micro-batch.
    """
    twin = copy.deepcopy(model).train()
    before = [one.clone() for one in twin.buffers()]
    with torch_undisturbed():
        twin(**arguments)
        changes = not all(map(torch.equal, before, twin.buffers()))
        for one in traced.nodes:
            if one.is_random:
                twin.get_submodule(one.path).eval()
        whole, again = (twin(**arguments) for _ in range(2))
        parts = joined([twin(**{k: micro_batch(v, m, number) for k, v in arguments.items()}) for m in range(number)])
    if changes or (_are_close(whole, again) and not _are_close(whole, parts)):
        raise UsageError(
            f"{type(model).__name__} computes a different result from a batch than from its micro-batches, as batch "
            "norm and sums over samples do: place it for latency, without micro-batches, or leave the sum to the loss."
        )


def _are_close(one: Any, other: Any) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(a.shape == b.shape and _is_close(a.double(), b.double()) for a, b in pairs)


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    largest = a.nan_to_num().abs().max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=_CLOSE * largest, equal_nan=True)
