"""Only the largest elements of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Moves, NotFiniteError, check_payload
from paceline.optim.half_types import is_finite
from paceline.specs.bounds import FRACTION


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Only the largest elements are sent; the sender adds the rest to its next gradient (error feedback).

    Costs: 8 bytes per float32 that is sent, so below fraction 0.5 it saves; one vector of memory at the sender, and a partial
    sort. Every element is sent at last, later the smaller it is: added staleness, so lower the learning rate, or warm up.
    Not: sending random elements, which is unbiased, but forgets most of the gradient.

    Args:
        fraction: share of the elements that is sent, at least one.

    Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599, Algorithm 1, with the
        learning rate applied by the receiver.
    """

    fraction: Annotated[float, FRACTION] = 0.01

    @property
    def remembers(self) -> bool:
        return True

    @property
    def moves(self) -> Moves:
        return Moves(8.0 + 27.0 * self.fraction, 1.0 + 14.0 * self.fraction)

    def num_kept(self, num_elements: int) -> int:
        if num_elements >= 2**31:
            raise ValueError(f"top-k stores indices in 32 bits, too few for {num_elements} elements: use more shards.")
        return min(num_elements, max(1, round(self.fraction * num_elements)))

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """uint8 (k * (4 + bytes of an element),): indices as int32, ascending; then values in the gradient's own type."""
        assert memory is not None, "top-k without its memory would lose what it does not send"
        given = gradient + memory
        if given.numel() and not is_finite(given):
            raise NotFiniteError("A gradient is not finite.")
        kept = given.abs().topk(self.num_kept(given.numel()), sorted=False).indices.sort().values
        largest, most = given[kept], torch.finfo(gradient.dtype).max  # of a half type, which sums may be beyond
        values = largest.clamp(-most, most).to(gradient.dtype)
        memory.copy_(given)
        memory[kept] = largest - values
        return torch.cat([kept.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        k = self.num_kept(num_elements)
        check_payload(encoded, torch.uint8, self.payload_bytes(num_elements, dtype))
        indices = encoded[: 4 * k].clone().view(torch.int32).to(torch.int64)  # a copy starts where an int32 may
        values = encoded[4 * k :].clone().view(dtype)
        if k and (int(indices.min()) < 0 or int(indices.max()) >= num_elements):
            raise ValueError(f"A top-k payload has indices beyond its {num_elements} elements.")
        return torch.zeros(num_elements, dtype=dtype).index_copy_(0, indices, values)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return self.num_kept(num_elements) * (4 + dtype.itemsize)
