"""The state that a loop has loaded into its optimizer, on its way to the servers, which have the optimizer."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

__all__ = ["state_from_bytes", "state_to_bytes"]


def state_to_bytes(state: dict[str, Tensor], elements: tuple[int, int]) -> Tensor:
    """Vectors (P,) and numbers, of which a shard gets its `elements`, as bytes to be sent."""
    file = io.BytesIO()
    torch.save({key: value[slice(*elements)].clone() if value.dim() else value for key, value in state.items()}, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def state_from_bytes(sent: Tensor, x: Tensor) -> dict[str, Tensor]:
    """What was sent to a shard whose parameters are `x` (n,); nothing in it is ever run.

    Raises:
        ValueError: it is something else, or another shard's.
    """
    try:
        state: Any = torch.load(io.BytesIO(sent.numpy().tobytes()), map_location=x.device, weights_only=True)
    except Exception as error:  # of bytes that are none of its files, PyTorch raises whatever it comes upon
        raise ValueError("bytes that PyTorch cannot read") from error
    if not isinstance(state, dict):
        raise ValueError(f"{type(state).__name__}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or value.shape not in ((), x.shape):
            raise ValueError(f"{key!r}, which is no state of {len(x):,} parameters")
    return state
