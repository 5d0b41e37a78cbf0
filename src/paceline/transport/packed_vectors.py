"""Several vectors as the bytes of one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 8  # bytes


def packed(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the vectors as bytes, (n,) uint8, each aligned."""
    out = room_for(vectors)
    for place, one in zip(unpacked(out, vectors), vectors, strict=True):
        place.copy_(one)
    return out


def room_for(likes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a message for vectors with the lengths and types of `likes`, without their values."""
    return torch.empty(sum(map(_aligned, likes)), dtype=torch.uint8)


def unpacked(x: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first vectors in `x`, which have the lengths and types of `likes`.

    >>> [one.tolist() for one in unpacked(packed([torch.ones(3), torch.zeros(1)]), [torch.empty(3), torch.empty(1)])]
    [[1.0, 1.0, 1.0], [0.0]]
    """
    found, begin = [], 0
    for like in likes:
        found.append(x[begin : begin + like.nbytes].view(like.dtype))
        begin += _aligned(like)
    return found


def _aligned(x: torch.Tensor) -> int:
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
