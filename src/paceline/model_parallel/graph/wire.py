"""Converts tensors to flat vectors for a mailbox and back; float32 travels as bfloat16 if wanted, rounded or truncated."""

from __future__ import annotations

import math

import torch

from paceline.model_parallel.graph.problem import TensorInfo

__all__ = ["WIRES", "from_wire", "to_wire", "truncated", "wire_bytes"]

#: Formats for float32: unchanged, rounded to the nearest bfloat16, or truncated as published in 2015.
WIRES = ("", "bfloat16", "bfloat16-truncated")
_PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """float32 without its lower 16 bits, as bfloat16; a NaN stays a NaN, even if only its lower bits mark it.

    Errors go towards zero: the mean loss is 0.3 %, while rounding is unbiased.
    """
    bits = x.contiguous().view(torch.int32)
    upper = (bits >> 16).to(torch.int16)
    upper = torch.where(torch.isnan(x), upper | 0x40, upper)
    return upper.view(torch.bfloat16)


def to_wire(x: torch.Tensor, wire: str) -> torch.Tensor:
    """The tensor as a flat vector of a type that mailboxes take."""
    x = x.detach()
    if wire and x.dtype == torch.float32:
        x = x.to(torch.bfloat16) if wire == "bfloat16" else truncated(x)
    x = x.contiguous().view(-1)
    return x if x.dtype in _PLAIN else x.view(torch.uint8)


def from_wire(x: torch.Tensor, tensor: TensorInfo, wire: str) -> torch.Tensor:
    """The tensor that `to_wire` was given."""
    dtype = getattr(torch, tensor.dtype)
    if wire and dtype == torch.float32:
        return x.to(dtype).view(tensor.shape)
    return (x if x.dtype == dtype else x.view(dtype)).view(tensor.shape)


def wire_bytes(shape: tuple[int, ...], dtype: str, wire: str) -> int:
    """The size of a tensor on the wire in bytes."""
    size = getattr(torch, dtype).itemsize
    return math.prod(shape) * (2 if wire and dtype == "float32" else size)
