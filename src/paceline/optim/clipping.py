"""Clips gradients of which some are sparse, which PyTorch's `clip_grad_norm_` does not take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """As `torch.nn.utils.clip_grad_norm_`; the elements of a sparse gradient are those of its rows, once they are added up."""
    return float(nn.utils.clip_grad_norm_([with_dense_gradient(one) for one in parameters], max_norm))


def with_dense_gradient(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter whose gradient has the memory of this one's values."""
    if parameter.grad is None or parameter.grad.layout != torch.sparse_coo:
        return parameter
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad.values()
    rows = nn.Parameter(values)
    rows.grad = values
    return rows
