"""TernGrad: minus the scale, zero, or plus the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from paceline.compression.codec import Codec, Encoded, Kind
from paceline.compression.levels import Buckets, as_float32, keys
from paceline.compression.qsgd import check_bucket, scale
from paceline.specs.bounds import ABOVE_0, BUCKET

__all__ = ["Ternary"]


@dataclass(frozen=True, kw_only=True)
class Ternary(Codec):
    """Every element becomes minus its bucket's scale, zero or plus, at random: 1.6 bits, five elements in a byte.

    On average it is the gradient, clipped if that is asked for. The squared error is on average at most the scale times the
    sum of magnitudes.

    Use when: a fifth of the bytes of float32's 8-bit forms still are too many. Noise is larger than that of `qsgd(bits=4)`:
    larger batches, or a lower learning rate.
    Not: `sign`, which sends a bit less, is wrong on average, and remembers.

    Args:
        clip: magnitudes beyond so many standard deviations of the vector are cut to that, which lowers the scale and the
            noise, at the cost of a bias; `none`: none is.
        bucket: elements with a scale of their own, a multiple of 8; `none`: one for the whole vector.

    Differs from the paper: scales are of buckets, not of layers.

    Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017,
        arXiv:1705.07878, equations 1 to 4 and section 4.
    """

    clip: Annotated[float, ABOVE_0] | None = 2.5
    bucket: Annotated[int, BUCKET] | None = 512

    kind: ClassVar[Kind] = "unbiased"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bucket(self.bucket)

    @property
    def encoding_moves(self) -> float:
        """As measured (`benchmarks/codecs.py`): a copy moves 2."""
        return 8.0

    @property
    def decoding_moves(self) -> float:
        """As measured."""
        return 6.0

    def clipped(self, gradient: Tensor) -> Tensor:
        """What is decoded on average."""
        if self.clip is None or not gradient.numel():
            return gradient
        x = gradient.to(torch.float32)
        limit = self.clip * float((x.double().square().mean() - x.double().mean().square()).clamp(min=0).sqrt())
        # NaN stays, for the scale to find.
        return x if limit == 0 else x.clamp(-limit, limit) if limit == limit else x

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Encoded:
        """uint8: scales as float32, then codes, five in a byte."""
        from paceline.compression import kernels

        x = as_float32(self.clipped(gradient))
        parts = self._parts(len(x))
        scale(parts, as_float32(gradient), "linf")  # infinity would be clipped away
        scale(parts, x, "linf")
        kernels.encode_trits(x, parts.scales, parts.bucket, *keys(key), parts.codes)
        return Encoded(parts.x)

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(elements,)."""
        from paceline.compression import kernels

        parts = self._parts(num_elements, encoded.x)
        parts.check_scales()
        out = np.empty(num_elements, np.float32)
        kernels.decode_trits(parts.codes, parts.scales, parts.bucket, out)
        return torch.from_numpy(out).to(dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Four for each bucket, one for each five elements."""
        return 4 * Buckets.number_of(num_elements, self.bucket) + -(-num_elements // 5)

    def _parts(self, num_elements: int, x: Tensor | None = None) -> Buckets:
        return Buckets(num_elements, self.bucket, -(-num_elements // 5), x)
