"""DQ-SGD: every step chooses how many bits its gradient is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from paceline.compression.bits_rule import BudgetRule, bits_of, factor_for_error
from paceline.compression.codec import Codec, Encoded, Tuner, check_payload
from paceline.compression.qsgd import QSGD, error_size
from paceline.errors import UsageError
from paceline.specs.bounds import ABOVE_0, BITS, BUCKET, COUNT, FRACTION

__all__ = ["DQ"]

_HEAD_BYTES = 4  # the bits, then nothing, so that scales begin where a float32 may
_SMOOTHING = 0.1


@dataclass(frozen=True, kw_only=True)
class DQ(Codec):
    """QSGD whose bits follow the gradient: more where it is larger than before, fewer where it is smaller.

    `target_bits` is the mean that a run may take, and the error is what comes of it; `target_error` is the error that each
    step may add, and the bits are what that takes. Sizes of gradients are those of the means that all workers have seen,
    smoothed over ten steps, so that all take the same bits without a message; at a server, each worker goes by its own
    gradients.

    Costs: those of `qsgd`. Gain: at the level of the error bound at most 0.4 bits per element, and more only where the
    gradient's size swings, as at warm-up or when the learning rate falls. With a gradient of one size it is `qsgd`.
    Use when: `qsgd` would be used and nobody knows which bits; or the error is to be bounded.

    Args:
        target_bits: mean bits per element; 4 where `target_error` is not given.
        target_error: the squared error that a step's rounding may add on average, by the bound, in units of the gradient.
        alpha: how much of a step's error is left after a step, for problems that shrink it; 1: all of it, as for networks.
            Below 1 later steps get more bits, and `total_steps` must be known.
        total_steps: T, for `alpha` below 1.
        min_bits: of a step.
        max_bits: of a step.
        norm: as for `qsgd`; the paper's is `l2`, with `bucket=none`.
        bucket: as for `qsgd`.

    Differs from the paper: bits are whole and bounded; the size of the present gradient is taken from those before it.

    Reference: Yan, Huang, Lan, Song, "DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed Learning",
        2021, arXiv:2107.14575.
    """

    target_bits: Annotated[float, ABOVE_0] | None = None
    target_error: Annotated[float, ABOVE_0] | None = None
    alpha: Annotated[float, FRACTION] = 1.0
    total_steps: Annotated[int, COUNT] | None = None
    min_bits: Annotated[int, BITS] = 2
    max_bits: Annotated[int, BITS] = 8
    norm: Literal["linf", "l2"] = "linf"
    bucket: Annotated[int, BUCKET] | None = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_bits is not None and self.target_error is not None:
            raise UsageError("dq keeps to target_bits or to target_error, not to both: leave out one of them.")
        if self.min_bits > self.max_bits:
            raise UsageError(f"min_bits of dq is {self.min_bits}, more than max_bits, {self.max_bits}: exchange them.")
        if not self.min_bits <= self._target_bits <= self.max_bits:
            raise UsageError(
                f"target_bits of dq must be from min_bits to max_bits, {self.min_bits} to {self.max_bits}, not"
                f" {self._target_bits:g}."
            )
        if self.alpha < 1 and self.total_steps is None:
            raise UsageError("alpha below 1 weighs a step by how many follow: give dq total_steps, or leave out alpha.")
        self.at(self.min_bits)  # checks the bucket

    @property
    def is_unbiased(self) -> bool:
        """As `qsgd`."""
        return True

    @property
    def _target_bits(self) -> float:
        return self.target_bits if self.target_bits is not None else min(self.max_bits, max(self.min_bits, 4))

    def at(self, bits: int) -> AtBits:
        """The codec with so many bits."""
        return AtBits(
            plain=QSGD(bits=bits, norm=self.norm, bucket=self.bucket), least=self.min_bits, most=self.max_bits
        )

    @property
    def encoding_moves(self) -> float:
        """Those of `qsgd`, and of looking how large the mean is."""
        return self.at(self.max_bits).plain.encoding_moves + 1.0

    @property
    def decoding_moves(self) -> float:
        """Those of `qsgd`."""
        return self.at(self.max_bits).plain.decoding_moves

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Encoded:
        """uint8: the bits, and a payload of `qsgd`; with the bits of a step of which nothing is known."""
        return self.at(round(self._target_bits)).encode(gradient, memory, key)

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(elements,), by the bits that the payload names."""
        return self.at(self.min_bits).decode(encoded, num_elements, dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """That of a step of which nothing is known."""
        return self.at(round(self._target_bits)).payload_bytes(num_elements, dtype)

    def tuner(self) -> DQTuner:
        """What follows the gradient's size."""
        return DQTuner(self)


@dataclass(frozen=True, kw_only=True)
class AtBits(Codec):
    """A step of `dq`: QSGD whose payload begins with its bits.

    Args:
        plain: it.
        least: bits that a payload may name.
        most: bits that a payload may name.
    """

    plain: QSGD = field(default_factory=QSGD)
    least: int = 2
    most: int = 8

    @property
    def encoding_moves(self) -> float:
        """Those of `qsgd`."""
        return self.plain.encoding_moves

    @property
    def decoding_moves(self) -> float:
        """Those of `qsgd`."""
        return self.plain.decoding_moves

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Encoded:
        """uint8: the bits, and a payload of `qsgd`."""
        head = torch.tensor([self.plain.bits, 0, 0, 0], dtype=torch.uint8)
        return Encoded(torch.cat([head, self.plain.encode(gradient, None, key).x]))

    def decode(self, encoded: Encoded, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(elements,), by the bits that the payload names."""
        x = encoded.x
        if x.dtype != torch.uint8 or x.dim() != 1 or len(x) < _HEAD_BYTES:
            check_payload(x, torch.uint8, self.payload_bytes(num_elements, dtype))
        bits = int(x[0])
        if not self.least <= bits <= self.most:
            raise ValueError(f"A payload is of {bits} bits where {self.least} to {self.most} are expected.")
        plain = QSGD(bits=bits, norm=self.plain.norm, bucket=self.plain.bucket)
        check_payload(x, torch.uint8, _HEAD_BYTES + plain.payload_bytes(num_elements, dtype))
        return plain.decode(Encoded(x[_HEAD_BYTES:]), num_elements, dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        """Four more than `qsgd`'s."""
        return _HEAD_BYTES + self.plain.payload_bytes(num_elements, dtype)


class DQTuner(Tuner):
    """Follows the gradient's size; implements the rule of both targets."""

    wants_size = True

    def __init__(self, dq: DQ) -> None:
        super().__init__(dq.at(round(dq._target_bits)))
        self._dq = dq
        self._steps = 0
        self._log2 = math.nan  # of the smoothed size's root
        self._budget = BudgetRule(dq._target_bits, dq.min_bits, dq.max_bits)

    def size_of(self, vector: Tensor) -> float:
        """4 s^2 times the bound of its error."""
        return error_size(vector, self._dq.norm, self._dq.bucket)

    def tell(self, size: float) -> None:
        """A gradient was so large; chooses the bits of the next."""
        dq, self._steps = self._dq, self._steps + 1
        if not (math.isfinite(size) and size > 0):
            return  # a gradient of zeros, or none: the next is expected to be as those before
        log2 = 0.5 * math.log2(size)
        self._log2 += _SMOOTHING * (log2 - self._log2) if self._log2 == self._log2 else 0.0
        self._log2 = self._log2 if self._log2 == self._log2 else log2
        left = max(0, dq.total_steps - self._steps) if dq.total_steps is not None else 0
        weighted = self._log2 + (0.5 * left * math.log2(dq.alpha) if dq.alpha < 1 else 0.0)
        if dq.target_error is None:
            bits = self._budget.next(weighted)
        else:
            exact = bits_of(factor_for_error(dq.target_error) + weighted)
            bits = min(dq.max_bits, max(dq.min_bits, math.ceil(exact)))
        self.codec = dq.at(bits)

    def state(self) -> dict[str, float]:
        """The smoothed size, the budget, and the bits of the next step."""
        budget, codec = self._budget, self.codec
        assert isinstance(codec, AtBits)
        return {
            "steps": self._steps, "log2": self._log2, "count": budget.count, "mean": budget.mean, "owed": budget.owed,
            "saved": budget.saved, "bits": codec.plain.bits,
        }  # fmt: skip

    def load(self, state: dict[str, float]) -> None:
        """Goes on from there."""
        self._steps, self._log2 = int(state["steps"]), state["log2"]
        self._budget.count, self._budget.mean = int(state["count"]), state["mean"]
        self._budget.saved = state["saved"]
        self._budget.owed, self.codec = state["owed"], self._dq.at(int(state["bits"]))
