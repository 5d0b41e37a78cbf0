"""Gradients rounded to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Moves, NotFiniteError, check_payload
from paceline.optim.half_types import is_finite


@dataclass(frozen=True, kw_only=True)
class BFloat16(Codec):
    """Every number rounded to the nearest bfloat16: half of float32's bytes, two to three decimal digits.

    Args:
        feedback: whether the sender adds each rounding error to its next gradient; costs one vector of memory. Even without
            it small gradients are sent, since bfloat16 has float32's range.
    """

    feedback: bool = False

    @property
    def moves(self) -> Moves:
        return Moves(7.0 if self.feedback else 1.5, 1.5)  # feedback is added first, then loses what was sent

    @property
    def remembers(self) -> bool:
        return self.feedback

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        given = gradient if memory is None else gradient + memory
        sent = given.to(torch.bfloat16)
        # The receiver's vector: a float16 can be infinite where the bfloat16 is not.
        decoded = sent.to(gradient.dtype) if gradient.dtype == torch.float16 else sent
        if sent.numel() and not is_finite(decoded):
            raise NotFiniteError("A gradient is not finite.")
        if memory is not None:
            torch.sub(given, decoded, out=memory)
        return sent

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        check_payload(encoded, torch.bfloat16, num_elements)
        return encoded.to(dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return 2 * num_elements
