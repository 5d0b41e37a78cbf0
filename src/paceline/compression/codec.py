"""What a codec is: a pair of functions between a vector and its payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.specs.types import check_fields
from paceline.vectors.half_types import sum_type

__all__ = ["WHAT", "Codec", "Encoded", "NoCodec", "NotFiniteError", "Tuner", "check_payload", "key_of", "share_of"]

WHAT = "what codecs remember"  # of a checkpoint
_MASK = 2**64 - 1
_LONG = 2**20  # elements


class NotFiniteError(ValueError):
    """A vector has infinite elements, NaN, or others that its codec's numbers cannot hold; no memory has been changed."""


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
        """How long `encode` takes: as reading and writing so many float32 vectors; of what computes, by measurement."""
        return 0.0

    @property
    def decoding_moves(self) -> float:
        """The same of `decode`."""
        return 0.0

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean over all keys of what is decoded is the gradient itself, to the rounding of its type."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether a sender keeps back what it has not sent, and adds it to later vectors."""
        return False

    def start(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """The sender's memory, zeros (num_elements,) of the type in which `dtype` is added up; None: it has none."""
        return torch.zeros(num_elements, dtype=sum_type(dtype)) if self.remembers else None

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Encoded:
        """Code a vector.

        With a memory, decoded(payload) + memory afterwards = gradient + memory before, rounded once, by that sum.

        Args:
            gradient: (elements,); only read.
            memory: what `start` gave; changed in place.
            key: what random numbers depend on, 64 bits: another for each worker, step and vector (`key_of`).

        Raises:
            NotFiniteError: it has infinite elements, NaN, or others that the codec's numbers cannot hold; the memory is as it
                was.
        """
        raise TypeError(f"{type(self).__name__} must define encode")

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The vector (num_elements,) that a payload stands for.

        Raises:
            ValueError: the payload cannot come from this codec and this number of elements.
        """
        raise TypeError(f"{type(self).__name__} must define decode")

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        raise TypeError(f"{type(self).__name__} must define payload_bytes")

    def tuner(self) -> Tuner:
        """What chooses this codec's parameters as a run goes on."""
        return Tuner(self)


class Tuner:
    """Chooses what a codec does at each step; this one changes nothing.

    A size is how large the error of coding is, in a unit that is the tuner's own. Sizes of a gradient's vectors add up.

    Attributes:
        codec: of the present step.
        wants_size: whether it asks for sizes.
        asks_first: whether of all workers' vectors, before any is coded; else of those before.
    """

    wants_size = False
    asks_first = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def size_of(self, vector: Tensor) -> float:
        """Of a vector (n,) that is to be coded as one; NaN: it cannot be."""
        return 0.0

    def coded_size(self, encoded: Encoded, num_elements: int) -> float:
        """Of a vector that has been coded."""
        return 0.0

    def fit(self, size: float, mean_size: float = 0.0, longest: int = 0) -> str:
        """Chooses for what is to be coded now.

        Args:
            size: of the vectors; of a mean's: all workers', each by the square of its share.
            mean_size: at most that of their mean, where that is coded anew.
            longest: elements that are coded as one, at most, in a mean.

        Returns:
            What to warn of, once; or empty.
        """
        return ""

    def tell(self, size: float) -> None:
        """What was coded was so large: chooses for what comes next."""

    def state(self) -> dict[str, Any]:
        """What must be known to go on."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from there."""


@dataclass(frozen=True, kw_only=True)
class NoCodec(Codec):
    """The gradient as it is; costs nothing, not even a copy."""

    @property
    def is_unbiased(self) -> bool:
        return True

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Encoded:
        return Encoded(gradient)

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        check_payload(encoded.x, dtype, num_elements)
        return encoded.x

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return num_elements * dtype.itemsize


def check_payload(x: Tensor, dtype: torch.dtype, num_elements: int) -> None:
    """Refuses a payload of another type or length."""
    if x.dtype != dtype or x.shape != (num_elements,):
        raise ValueError(f"A payload is {x.dtype} {tuple(x.shape)} where {dtype} ({num_elements},) is expected.")


def key_of(*parts: int) -> int:
    """64 bits that depend on all of these numbers: a seed of the worker's own, a step, a vector.

    >>> key_of(7, 1, 2) == key_of(7, 1, 2), key_of(7, 1, 2) == key_of(7, 2, 1)
    (True, False)
    """
    key = 0
    for part in parts:
        key = (key ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def share_of(codec: Codec) -> float:
    """A payload's bytes, as a share of a long float32 vector's."""
    return codec.payload_bytes(_LONG, torch.float32) / (4 * _LONG)
