"""TernGrad: minus the scale, zero, or plus the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from paceline.compression.codec import Moves
from paceline.compression.levels import BucketCodec, Buckets, keys
from paceline.compression.qsgd import scale
from paceline.specs.bounds import ABOVE_0, BUCKET


@dataclass(frozen=True, kw_only=True)
class Ternary(BucketCodec):
    """Every element becomes minus its bucket's scale, zero or plus, at random: 1.6 bits, five elements in a byte.

    Without a clip, decoded values are unbiased. The expected squared error is the sum over elements of |x| (scale - |x|).

    Use when: 4 or 8 bits per element are too many. Noise is larger than that of `qsgd(bits=4)`: use larger batches or a
    lower learning rate.
    Not: `sign`, which sends 1 bit per element, is biased, and needs error feedback.

    Args:
        clip: magnitudes beyond so many times the vector's root mean square are cut to that, which lowers the scale and the
            noise. The clipped part is lost, so the mean is wrong: at the paper's 2.5 by 0.2 % of the square norm where
            elements are Gaussian, by nearly all of it where few are not zero. `none`: nothing is cut off.
        bucket: elements per scale, a multiple of 8; `none`: one scale for the whole vector.

    Differs from the paper: scales are of buckets, not of layers; nothing is clipped unless that is asked for, and then by the
        root mean square, not the deviation from the mean, which is 0 if all elements are equal.

    Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017,
        arXiv:1705.07878, equations 1 to 4 and section 4.
    """

    clip: Annotated[float, ABOVE_0] | None = None
    bucket: Annotated[int, BUCKET] | None = 512

    @property
    def moves(self) -> Moves:
        return Moves(8.0, 6.0)

    def clipped(self, gradient: Tensor) -> Tensor:
        """The expected decoded value."""
        if self.clip is None:
            return gradient
        limit = self.clip * float(gradient.double().square().mean().sqrt())
        return gradient.to(torch.float32).clamp(-limit, limit)

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """uint8: scales as float32, then codes, five in a byte."""
        from paceline.compression import kernels

        parts = self.parts(len(gradient))
        x = scale(parts, gradient, "linf")
        if self.clip is not None:
            x = scale(parts, self.clipped(gradient), "linf")
        kernels.encode_trits(x, parts.scales, parts.bucket, *keys(key), parts.codes)
        return parts.x

    def code_bytes(self, num_elements: int) -> int:
        return -(-num_elements // 5)

    def read(self, parts: Buckets, out: np.ndarray) -> None:
        from paceline.compression import kernels

        kernels.decode_trits(parts.codes, parts.scales, parts.bucket, out)
