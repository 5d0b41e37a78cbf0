"""QSGD: gradients rounded to a few levels, at random, so that they are right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.compression.codec import Moves, NotFiniteError
from paceline.compression.levels import BucketCodec, Buckets, as_float32, keys
from paceline.specs.bounds import BITS, BUCKET


@dataclass(frozen=True, kw_only=True)
class QSGD(BucketCodec):
    """Every element rounded to one of 2^B - 1 levels between minus and plus its bucket's scale, up or down at random.

    Decoded vectors are unbiased (to 2^-24 of a level), so there is no error feedback. The squared error is on average at most
    n / (4 s^2) times the scale's square for a bucket of n, with s = 2^(B-1) - 1 levels on each side.

    Costs: B bits per element, and 32 for every bucket. Packed for every B.
    Use when: the network is the bottleneck, and the gradient noise is larger than that of rounding.
    Not: `sign` and `top-k`, which send less, are biased, and need error feedback.

    Args:
        bits: B, from 2 to 8.
        norm: scales are the largest magnitude (`linf`), or the Euclidean norm (`l2`), as in the papers; the latter is larger
            by up to the root of n, and so is the error.
        bucket: elements per scale, a multiple of 8; `none`: one scale for the whole vector.

    Differs from the paper: levels are sent without Elias codes, so that sizes are known beforehand.

    Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017,
        arXiv:1610.02132, section 3.1.
    """

    bits: Annotated[int, BITS] = 4
    norm: Literal["linf", "l2"] = "linf"
    bucket: Annotated[int, BUCKET] | None = 512

    @property
    def levels(self) -> int:
        """s, on each side of zero."""
        return 2 ** (self.bits - 1) - 1

    @property
    def moves(self) -> Moves:
        return Moves(4.0, 2.5)

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """uint8: scales as float32, then codes, eight in B bytes."""
        from paceline.compression import kernels

        parts = self.parts(len(gradient))
        x = scale(parts, gradient, self.norm)
        kernels.encode_levels(x, parts.scales, parts.bucket, self.levels, self.bits, *keys(key), parts.codes)
        return parts.x

    def code_bytes(self, num_elements: int) -> int:
        return -(-num_elements // 8) * self.bits

    def read(self, parts: Buckets, out: np.ndarray) -> None:
        from paceline.compression import kernels

        kernels.decode_levels(parts.codes, parts.scales, parts.bucket, self.levels, self.bits, out)

    def error_bound(self, vector: Tensor) -> float:
        """Upper bound of the mean squared error of decoding `vector` (n,)."""
        return error_size(vector, self.norm, self.bucket) / (4 * self.levels**2)


def scale(parts: Buckets, vector: Tensor, norm: str) -> np.ndarray:
    """Writes the scales of a vector (n,), and returns the vector as kernels take it.

    A norm beyond the range of the vector's type is cut to its largest number: no element is larger, and no level infinite.

    Raises:
        NotFiniteError: it has infinite elements or NaN, or of float64 what float32 cannot hold.
    """
    from paceline.compression import kernels

    x, most = as_float32(vector), min(torch.finfo(vector.dtype).max, torch.finfo(torch.float32).max)
    finite = kernels.largest(x.view(np.uint32), parts.bucket, parts.scales.view(np.uint32))
    if finite and norm == "l2":
        kernels.euclidean_norms(x, parts.bucket, most, parts.scales)
    if not finite:
        raise NotFiniteError("A gradient is not finite.")
    return x


def error_size(vector: Tensor, norm: str, bucket: int | None) -> float:
    """4 s^2 times the bound of the squared error of rounding `vector` (n,) to s levels; NaN if it is not finite."""
    parts = Buckets(len(vector), bucket, 0)
    try:
        scale(parts, vector, norm)
    except NotFiniteError:
        return math.nan
    return size_of_scales(parts, len(vector))


def size_of_scales(parts: Buckets, num_elements: int) -> float:
    """The same for a vector with this many elements and these scales."""
    from paceline.compression import kernels

    return float(kernels.sum_of_peaks(parts.scales, num_elements, parts.bucket))
