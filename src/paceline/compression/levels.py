"""The base class of codecs with packed codes: payloads of bucket scales, then codes, in bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.compression.codec import Codec, check_payload
from paceline.errors import UsageError


class BucketCodec(Codec):
    """A codec whose payload is uint8: a float32 scale for every bucket, then packed codes."""

    bucket: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket is not None and self.bucket % 8:
            raise UsageError(
                f"bucket must be a multiple of 8, so that each begins with a whole byte, not {self.bucket}."
            )

    def code_bytes(self, num_elements: int) -> int:
        raise TypeError(f"{type(self).__name__} must define code_bytes")

    def read(self, parts: Buckets, out: np.ndarray) -> None:
        """Decodes into `out` (elements,), float32."""
        raise TypeError(f"{type(self).__name__} must define read")

    def parts(self, num_elements: int, x: Tensor | None = None) -> Buckets:
        """The parts of the payload `x`; None: of a new one."""
        return Buckets(num_elements, self.bucket, self.code_bytes(num_elements), x)

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        parts = self.parts(num_elements, encoded)
        parts.check_scales()
        out = np.empty(num_elements, np.float32)
        self.read(parts, out)
        return torch.from_numpy(out).to(dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return 4 * Buckets.number_of(num_elements, self.bucket) + self.code_bytes(num_elements)


class Buckets:
    """A payload's parts: `scales` float32 (buckets,), and `codes` uint8, views of one tensor `x`.

    Args:
        bucket: elements with one scale; None: all.

    Raises:
        ValueError: `x` has another type or length.
    """

    def __init__(self, num_elements: int, bucket: int | None, code_bytes: int, x: Tensor | None = None) -> None:
        self.bucket = bucket if bucket is not None else max(8, -(-num_elements // 8) * 8)
        num_buckets = self.number_of(num_elements, bucket)
        size = 4 * num_buckets + code_bytes
        if x is None:
            x = torch.zeros(size, dtype=torch.uint8)
        else:
            check_payload(x, torch.uint8, size)
        self.x = x
        content = x.numpy()
        if content.ctypes.data % 4:
            content = content.copy()  # scales begin where a float32 may
        self.scales = content[: 4 * num_buckets].view(np.float32)
        self.codes = content[4 * num_buckets :]

    @staticmethod
    def number_of(num_elements: int, bucket: int | None) -> int:
        return -(-num_elements // bucket) if bucket is not None else min(1, num_elements)

    def check_scales(self) -> None:
        """Refuses scales that no codec sends; raises ValueError if one is negative, infinite or NaN."""
        if not bool(np.isfinite(self.scales).all()) or (self.scales < 0).any():
            raise ValueError("A payload has a scale that is not finite, or negative.")


def as_float32(x: Tensor) -> np.ndarray:
    """A vector (n,) as kernels take it, without a copy if it is float32; float64 is rounded to the nearest."""
    return x.detach().to(torch.float32).contiguous().numpy()


def keys(key: int) -> tuple[np.uint32, np.uint32]:
    """64 bits as two words."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
