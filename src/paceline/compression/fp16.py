"""Gradients rounded to float16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Moves, NotFiniteError, check_payload
from paceline.optim.half_types import is_finite


@dataclass(frozen=True, kw_only=True)
class Float16(Codec):
    """Every number rounded to the nearest float16: half of float32's bytes, three to four decimal digits.

    Use when: a gradient's elements lie between 6e-8 and 65,504. Smaller elements become 0; a gradient with a larger element is
    left out, with a warning. GradScaler does not change that: gradients travel without its scale.
    Not: `bf16`, which has float32's range and a digit less.
    """

    @property
    def moves(self) -> Moves:
        return Moves(1.5, 1.5)

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        sent = gradient.to(torch.float16)
        if sent.numel() and not is_finite(sent):
            raise NotFiniteError("A gradient has elements that do not fit in float16.")
        return sent

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        check_payload(encoded, torch.float16, num_elements)
        return encoded.to(dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return 2 * num_elements
