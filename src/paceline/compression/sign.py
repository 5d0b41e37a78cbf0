"""Scaled signs, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from paceline.compression.codec import Moves, NotFiniteError
from paceline.compression.levels import BucketCodec, Buckets, as_float32
from paceline.specs.bounds import BUCKET


@dataclass(frozen=True, kw_only=True)
class Sign(BucketCodec):
    """Every element's sign, times its bucket's mean magnitude; the sender adds the rest to its next gradient.

    Zero counts as positive. For a Gaussian vector, one message has 2 / pi = 0.64 of the square norm; error feedback sends the
    rest later.

    Costs: one bit per element, and 32 for every bucket; one vector of memory at the sender, and under all-reduce another n-th
    at each worker, for its part of the mean.
    Use when: the network is slow, and the optimizer is plain SGD, or has a learning rate several times lower than usual.
    Not: with momentum at a rate that suits `all-reduce`: momentum amplifies the delayed error feedback. On a quadratic loss
    with curvatures of 0.2 to 1 and momentum 0.9 it diverges at rate 0.5, where `all-reduce` and `qsgd(bits=4)` converge; it
    converges at rate 0.02, and without momentum at 0.5. Nor is it signSGD, which has no error feedback, and diverges on simple
    examples; or 1-bit Adam, which compresses the momentum.

    Args:
        bucket: elements per scale, a multiple of 8; `none`: one scale for the whole vector.

    Differs from the paper: the memory is in gradients, not in steps, so that the receiver can use any optimizer; scales are
    per bucket, not per layer.

    Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
        arXiv:1901.09847, Algorithm 1; the second memory is that of 1-bit Adam, arXiv:2102.02888.
    """

    bucket: Annotated[int, BUCKET] | None = 512

    @property
    def remembers(self) -> bool:
        return True

    @property
    def moves(self) -> Moves:
        return Moves(14.0, 3.0)

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """uint8: scales as float32, then signs, eight in a byte."""
        from paceline.compression import kernels

        assert memory is not None, "signs without their memory would lose what they do not say"
        given = gradient + memory
        x = as_float32(given)
        parts = self.parts(len(x))
        if not kernels.mean_magnitudes(x, parts.bucket, parts.scales):
            raise NotFiniteError("A gradient is not finite.")
        kernels.encode_signs(x, parts.codes)
        torch.sub(given, self.decode(parts.x, len(x), gradient.dtype), out=memory)
        return parts.x

    def code_bytes(self, num_elements: int) -> int:
        return -(-num_elements // 8)

    def read(self, parts: Buckets, out: np.ndarray) -> None:
        from paceline.compression import kernels

        kernels.decode_signs(parts.codes, parts.scales, parts.bucket, out)
