"""Send the state that a loop has loaded into its optimizer to the servers, which run the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.system.plain_tensors import tensors_from_bytes, tensors_to_bytes

__all__ = ["state_from_bytes", "state_to_bytes"]


def state_to_bytes(state: dict[str, Tensor], elements: tuple[int, int]) -> Tensor:
    """A shard's `elements` of vectors (P,), and numbers, as bytes."""
    own = {key: value[slice(*elements)] if value.dim() else value for key, value in state.items()}
    return torch.frombuffer(tensors_to_bytes(own), dtype=torch.uint8)


def state_from_bytes(sent: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The inverse of `state_to_bytes`, for a shard whose parameters are `x` (n,).

    Raises:
        ValueError: the bytes are malformed, or another shard's.
    """
    state = tensors_from_bytes(sent.numpy().tobytes())
    for key, value in state.items():
        if value.shape not in ((), x.shape):
            raise ValueError(f"{key!r}, which does not fit {len(x):,} parameters")
    return {key: value.to(x.device) for key, value in state.items()}
