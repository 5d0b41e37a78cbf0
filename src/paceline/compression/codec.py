"""What a gradient looks like on its way: codecs. Later quantizers plug in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.specs.bounds import FRACTION
from paceline.specs.types import check_fields

__all__ = ["BFloat16", "Codec", "Encoded", "NoCodec", "TopK"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded vector.

    Args:
        x: the payload, one contiguous tensor that a message can carry. Of `none` it is the gradient itself: send it before the
            gradient changes.
    """

    x: Tensor


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A pair of functions between a vector and its payload, and the sender's memory of what was not sent."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def encoding_moves(self) -> float:
        """How many vectors `encode` reads, plus how many it writes."""
        return 0.0

    @property
    def decoding_moves(self) -> float:
        """The same of `decode`."""
        return 0.0

    def start(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """The sender's memory of what it has kept back: zeros (num_elements,), or None where nothing is ever made up for."""
        return None

    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        """Code a vector.

        With a memory, decoded(payload) + memory afterwards = gradient + memory before, rounded once, by that sum.

        Args:
            gradient: (elements,); only read.
            memory: what `start` gave; changed in place.
        """
        raise TypeError(f"{type(self).__name__} must define encode")

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The vector (num_elements,) that a payload stands for.

        Raises:
            ValueError: the payload cannot come from this codec and this number of elements.
        """
        raise TypeError(f"{type(self).__name__} must define decode")

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Size of a payload."""
        raise TypeError(f"{type(self).__name__} must define payload_bytes")


@dataclass(frozen=True, kw_only=True)
class NoCodec(Codec):
    """The gradient as it is; costs nothing, not even a copy."""

    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        """The gradient itself."""
        return Encoded(gradient)

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The payload itself."""
        _check_payload(encoded.x, dtype, num_elements)
        return encoded.x

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """The gradient's size."""
        return num_elements * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class BFloat16(Codec):
    """Every number rounded to bfloat16: half of float32's bytes, two to three decimal digits.

    Args:
        feedback: whether the sender adds each rounding error to its next gradient; costs one vector of memory. Without it, a
            gradient that is small next to the others is still sent, since bfloat16 has float32's range.
    """

    feedback: bool = False

    @property
    def encoding_moves(self) -> float:
        """Of float32: rounded; with feedback, first added to the memory, which then loses what was sent."""
        return 7.0 if self.feedback else 1.5

    @property
    def decoding_moves(self) -> float:
        """Half a vector read and one written."""
        return 1.5

    def start(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Zeros if there is feedback."""
        return torch.zeros(num_elements, dtype=dtype) if self.feedback else None

    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        """(elements,) bfloat16."""
        if memory is None:
            return Encoded(gradient.to(torch.bfloat16))
        memory.add_(gradient)
        sent = memory.to(torch.bfloat16)
        memory.sub_(sent)
        return Encoded(sent)

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(elements,) of the wanted type."""
        _check_payload(encoded.x, torch.bfloat16, num_elements)
        return encoded.x.to(dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Two per element."""
        return 2 * num_elements


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

    def start(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Zeros."""
        return torch.zeros(num_elements, dtype=dtype)

    @property
    def encoding_moves(self) -> float:
        """Of float32: added to the memory, absolute values, and one pass to choose, which takes longer; then what is kept."""
        return 6.0 + 22.0 * self.fraction

    @property
    def decoding_moves(self) -> float:
        """A vector of zeros written, and what was kept."""
        return 1.0 + 14.0 * self.fraction

    def num_kept(self, num_elements: int) -> int:
        """How many of so many elements are sent."""
        if num_elements >= 2**31:
            raise ValueError(f"top-k counts elements with 32 bits, and cannot take {num_elements}: use more shards.")
        return min(num_elements, max(1, round(self.fraction * num_elements)))

    def encode(self, gradient: Tensor, memory: Tensor | None) -> Encoded:
        """uint8 (k * (4 + bytes of an element),): indices as int32, ascending; then values in the gradient's own type."""
        assert memory is not None, "top-k without its memory would lose what it does not send"
        memory.add_(gradient)
        kept = memory.abs().topk(self.num_kept(memory.numel()), sorted=False).indices.sort().values
        values = memory[kept]
        memory[kept] = 0
        return Encoded(torch.cat([kept.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]))

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros (elements,) with the values at their places."""
        k = self.num_kept(num_elements)
        _check_payload(encoded.x, torch.uint8, self.payload_bytes(num_elements, dtype))
        indices = encoded.x[: 4 * k].clone().view(torch.int32).to(torch.int64)  # a copy starts where an int32 may
        values = encoded.x[4 * k :].clone().view(dtype)
        if k and (int(indices.min()) < 0 or int(indices.max()) >= num_elements):
            raise ValueError(f"A top-k payload names elements beyond the {num_elements} that there are.")
        return torch.zeros(num_elements, dtype=dtype).index_copy_(0, indices, values)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Four more than a number's, for every element sent."""
        return self.num_kept(num_elements) * (4 + dtype.itemsize)


def _check_payload(x: Tensor, dtype: torch.dtype, num_elements: int) -> None:
    if x.dtype != dtype or x.shape != (num_elements,):
        raise ValueError(f"A payload is {x.dtype} {tuple(x.shape)} where {dtype} ({num_elements},) is expected.")
