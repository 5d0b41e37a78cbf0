"""The base class of codecs: a pair of functions between a vector and its payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.optim.half_types import sum_type
from paceline.specs.types import check_fields

WHAT = "what codecs remember"  # of a checkpoint
_MASK = 2**64 - 1
_LONG = 2**20  # elements


class NotFiniteError(ValueError):
    """A vector has infinities, NaN, or elements beyond the codec's range; the sender's memory is unchanged."""


class Moves(NamedTuple):
    """The times of coding and decoding, in reads and writes of the coded vector as float32; a copy moves 2."""

    encoding: float
    decoding: float


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A pair of functions between a vector and its payload, and the sender's memory for error feedback."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def moves(self) -> Moves:
        """The cost of coding; measured by `benchmarks/codecs.py` for codecs that compute."""
        return Moves(0.0, 0.0)

    @property
    def remembers(self) -> bool:
        """Whether the sender uses error feedback: adds what it has not sent to later vectors."""
        return False

    def start(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """The sender's memory, zeros (num_elements,) of the type for sums of `dtype`; None: no error feedback."""
        return torch.zeros(num_elements, dtype=sum_type(dtype)) if self.remembers else None

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """Code a vector as one contiguous tensor that a message can carry.

        For `none` it is the gradient itself: send it before the gradient changes.
        With a memory, decoded(payload) + memory afterwards = gradient + memory before, rounded once, by that sum.

        Args:
            gradient: (elements,); only read.
            memory: from `start`; changed in place.
            key: 64-bit seed of the random numbers, different for each worker, step and vector (`key_of`).

        Raises:
            NotFiniteError: it has infinities, NaN, or elements beyond the codec's range; the memory is unchanged.
        """
        raise TypeError(f"{type(self).__name__} must define encode")

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The vector (num_elements,) of a payload.

        Raises:
            ValueError: the payload cannot come from this codec and this number of elements.
        """
        raise TypeError(f"{type(self).__name__} must define decode")

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        raise TypeError(f"{type(self).__name__} must define payload_bytes")

    def tuner(self) -> Tuner:
        """The tuner that chooses this codec's parameters during a run."""
        return Tuner(self)


class Tuner:
    """Chooses a codec's parameters at each step; this base class changes nothing.

    A size measures the coding error in the tuner's own unit. Sizes of a gradient's vectors add up.
    """

    wants_size = False  # whether it needs sizes
    # Whether it needs the sizes of all workers' vectors before any is coded; else those of earlier ones.
    asks_first = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec  # of the present step

    def size_of(self, vector: Tensor) -> float:
        """The size of a vector (n,) that is coded as one; NaN: it cannot be coded."""
        return 0.0

    def coded_size(self, encoded: Tensor, num_elements: int) -> float:
        return 0.0

    def fit(self, size: float, mean_size: float = 0.0, longest: int = 0) -> str:
        """Chooses the parameters for the present vectors.

        Args:
            size: of the vectors; for a mean: all workers', each weighted by the square of its share.
            mean_size: upper bound of their mean's size, if the mean is re-encoded.
            longest: maximum number of elements coded as one in a mean.

        Returns:
            A warning to give once; empty if there is none.
        """
        return ""

    def tell(self, size: float) -> None:
        """Reports the size of the coded vectors; chooses the parameters for the next."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""


@dataclass(frozen=True, kw_only=True)
class NoCodec(Codec):
    """The unchanged gradient; costs nothing, not even a copy."""

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        return gradient

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        check_payload(encoded, dtype, num_elements)
        return encoded

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return num_elements * dtype.itemsize


def check_payload(x: Tensor, dtype: torch.dtype, num_elements: int) -> None:
    """Refuses a payload of another type or length."""
    if x.dtype != dtype or x.shape != (num_elements,):
        raise ValueError(f"A payload is {x.dtype} {tuple(x.shape)} where {dtype} ({num_elements},) is expected.")


def key_of(*parts: int) -> int:
    """64 bits that depend on all of these numbers, such as the worker's seed, a step and a vector.

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
    """A payload's bytes as a share of a long float32 vector's."""
    return codec.payload_bytes(_LONG, torch.float32) / (4 * _LONG)
