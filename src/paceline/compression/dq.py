"""DQ-SGD: chooses the number of bits for each step's gradient."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from paceline.compression.bits_rule import Budget, History, error_of, power
from paceline.compression.codec import Codec, Moves, Tuner, check_payload
from paceline.compression.qsgd import QSGD, error_size, size_of_scales
from paceline.errors import UsageError
from paceline.specs.bounds import ABOVE_0, BITS, BUCKET, COUNT, FRACTION

_HEAD_BYTES = 4  # the bits, then nothing, so that scales begin where a float32 may


@dataclass(frozen=True, kw_only=True)
class DQ(Codec):
    """QSGD whose bits follow the gradient: more bits for large gradients, fewer for small ones.

    Give either `target_bits`, the mean over a run, or `target_error`, the maximum error per step. Sizes include all rounded
    vectors: each worker's gradient, and their mean, which is rounded again. With `target_bits` workers choose by earlier
    steps, without communication; with `target_error` they first exchange the present sizes. With a server, each worker uses
    its own present gradient, and each push keeps to the target.

    Costs: those of `qsgd`. With `target_error`, one small all-reduce per step, and no overlap of coding with backward.
    Gain of `target_bits`: up to half of the error at equal bits if norms swing beyond half and twice their mean; with
    `alpha`, that of its known weights. Norms that only rise or fall get the target's bits. With `alpha` 1 the sum of error
    bounds stays within 5 % of that of fixed bits.
    Use when: `qsgd` fits, and the gradient's size swings; or the error must be bounded.

    Args:
        target_bits: mean bits per element; 4 if `target_error` is not given.
        target_error: bound of the mean squared error that rounding adds to the mean gradient of a step (of each backward
            pass; of each average of models); with `alpha` below 1, of what remains of it at the end. A step that needs more
            than `max_bits` gets `max_bits`, with one warning.
        alpha: share of a step's error that remains after a step, for problems that shrink it; 1: all of it, as for networks.
            Below 1 later steps get more bits.
        total_steps: T, for `alpha` below 1. The budget holds to 2 % without it.
        min_bits: of a step.
        max_bits: of a step.
        norm: as for `qsgd`; the paper's is `l2`, with `bucket=none`.
        bucket: as for `qsgd`.

    Differs from the paper: bits are whole and bounded. For `target_bits` the present gradient's size is predicted from earlier
    ones, and a step saves or spends at most one bit.

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
            raise UsageError("dq takes either target_bits or target_error, not both: leave out one of them.")
        if self.min_bits > self.max_bits:
            raise UsageError(f"dq's min_bits, {self.min_bits}, is above its max_bits, {self.max_bits}: swap them.")
        if not self.min_bits <= self._target_bits <= self.max_bits:
            raise UsageError(
                f"dq's target_bits must be from min_bits to max_bits, {self.min_bits} to {self.max_bits}, not "
                f"{self._target_bits:g}."
            )
        if self.alpha < 1 and self.total_steps is None:
            raise UsageError(
                "With alpha below 1, a step's weight depends on how many steps follow: give dq total_steps, or leave "
                "out alpha."
            )
        self.at(self.min_bits)  # checks the bucket

    @property
    def _target_bits(self) -> float:
        return self.target_bits if self.target_bits is not None else min(self.max_bits, max(self.min_bits, 4))

    def at(self, bits: int) -> AtBits:
        return AtBits(
            plain=QSGD(bits=bits, norm=self.norm, bucket=self.bucket), least=self.min_bits, most=self.max_bits
        )

    @property
    def moves(self) -> Moves:
        encoding, decoding = self.at(self.max_bits).moves
        return Moves(encoding + 1.0, decoding)

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        """uint8: the bits, and a payload of `qsgd`; uses the target bits."""
        return self.at(round(self._target_bits)).encode(gradient, memory, key)

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self.at(self.min_bits).decode(encoded, num_elements, dtype)

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return self.at(round(self._target_bits)).payload_bytes(num_elements, dtype)

    def tuner(self) -> Tuner:
        return BudgetTuner(self) if self.target_error is None else ErrorTuner(self)


@dataclass(frozen=True, kw_only=True)
class AtBits(Codec):
    """A step of `dq`: QSGD whose payload begins with its bits."""

    plain: QSGD = field(default_factory=QSGD)
    least: int = 2
    most: int = 8

    @property
    def moves(self) -> Moves:
        return self.plain.moves

    def encode(self, gradient: Tensor, memory: Tensor | None, key: int = 0) -> Tensor:
        head = torch.tensor([self.plain.bits, 0, 0, 0], dtype=torch.uint8)
        return torch.cat([head, self.plain.encode(gradient, None, key)])

    def decode(self, encoded: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._plain_of(encoded, num_elements).decode(encoded[_HEAD_BYTES:], num_elements, dtype)

    def size_of(self, encoded: Tensor, num_elements: int) -> float:
        """4 s^2 times the error bound of the payload."""
        plain = self._plain_of(encoded, num_elements)
        return size_of_scales(plain.parts(num_elements, encoded[_HEAD_BYTES:]), num_elements)

    def _plain_of(self, x: Tensor, num_elements: int) -> QSGD:
        if x.dtype != torch.uint8 or x.dim() != 1 or len(x) < _HEAD_BYTES:
            check_payload(x, torch.uint8, self.payload_bytes(num_elements, torch.float32))
        bits = int(x[0])
        if not self.least <= bits <= self.most:
            raise ValueError(f"A payload has {bits} bits where {self.least} to {self.most} are expected.")
        plain = QSGD(bits=bits, norm=self.plain.norm, bucket=self.plain.bucket)
        check_payload(x, torch.uint8, _HEAD_BYTES + plain.payload_bytes(num_elements, torch.float32))
        return plain

    def payload_bytes(self, num_elements: int, dtype: torch.dtype) -> int:
        return _HEAD_BYTES + self.plain.payload_bytes(num_elements, dtype)


class _SizesOfDQ(Tuner):
    """Sizes are 4 s^2 times the bound of the error of rounding to s levels."""

    wants_size = True

    def __init__(self, dq: DQ, bits: int) -> None:
        super().__init__(dq.at(bits))
        # bits: of the present step.
        self._dq, self.bits = dq, bits

    def _take(self, bits: int) -> None:
        self.codec, self.bits = self._dq.at(bits), bits

    def size_of(self, vector: Tensor) -> float:
        return error_size(vector, self._dq.norm, self._dq.bucket)


class ErrorTuner(_SizesOfDQ):
    """Chooses the fewest bits that keep the present step's error within the target, by the bounds of all its roundings.

    The second rounding, of the mean, sees rounded vectors. Rounding does not change the largest
    magnitudes. On average it increases a squared Euclidean norm by the error, and so the bound of the second rounding.
    """

    asks_first = True

    def __init__(self, dq: DQ) -> None:
        super().__init__(dq, round(dq._target_bits))
        self._steps, self._has_warned = 0, False

    def fit(self, size: float, mean_size: float = 0.0, longest: int = 0) -> str:
        """As `Tuner.fit`; a size that is not finite belongs to vectors that are not sent."""
        dq, target = self._dq, self._dq.target_error
        assert target is not None
        self._steps += 1
        weight = power(dq.alpha, max(0, (dq.total_steps or 0) - self._steps))
        if not math.isfinite(size):
            return ""
        for bits in range(dq.min_bits, dq.max_bits + 1):
            one = error_of(bits)
            grown = min(longest, dq.bucket or longest) * one * size if dq.norm == "l2" else 0.0
            self._take(bits)
            if (size + mean_size + grown) * one * weight <= target:
                return ""
        has_warned, self._has_warned = self._has_warned, True
        return "" if has_warned else (
            f"Rounding to max_bits={dq.max_bits} adds more to a step's squared error than dq's target_error={target:g}, by the"
            " bound: raise target_error, or take smaller buckets or larger max_bits. This is said once."
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class BudgetTuner(_SizesOfDQ):
    """Keeps the mean bits to the target, by `Budget`."""

    def __init__(self, dq: DQ) -> None:
        self._budget = Budget(dq._target_bits, dq.min_bits, dq.max_bits, dq.alpha, dq.total_steps)
        super().__init__(dq, self._budget.choose())

    def coded_size(self, encoded: Tensor, num_elements: int) -> float:
        assert isinstance(self.codec, AtBits)
        return self.codec.size_of(encoded, num_elements)

    def fit(self, size: float, mean_size: float = 0.0, longest: int = 0) -> str:
        self._take(self._budget.choose(size))
        self._budget.account(size, self.bits)
        return ""

    def tell(self, size: float) -> None:
        self._budget.account(size, self.bits)
        self._take(self._budget.choose())

    def state(self) -> dict[str, Any]:
        return {**asdict(self._budget.history), "bits": self.bits}

    def load(self, state: dict[str, Any]) -> None:
        history = dict(state)
        self._take(int(history.pop("bits")))
        self._budget.history = History(**history)
