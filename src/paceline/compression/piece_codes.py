"""The codes of pieces in rows of bytes: how they are read, and added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.compression.codec import Tuner
from paceline.ports.ports import NUM_NUMBERS

HEAD = 3 * 8 + NUM_NUMBERS * 4  # bytes of a row before its payload


class Head(NamedTuple):
    """What a worker says in the head of each of its rows."""

    codec: float  # its fingerprint
    used: float  # weight with which its vector takes part
    given: float  # weight of its vector
    numbers: Sequence[float]  # to be added up

    def bytes(self) -> Tensor:
        own = torch.tensor((self.codec, self.used, self.given), dtype=torch.float64)
        numbers = torch.tensor(self.numbers, dtype=torch.float32)
        return torch.cat([own.view(torch.uint8), numbers.view(torch.uint8)])


class PieceCodes:
    """The codes of one step's pieces, all of the same codec and length.

    Args:
        piece: elements of a piece.
    """

    def __init__(self, tuner: Tuner, piece: int, dtype: torch.dtype, kind: torch.dtype) -> None:
        self._tuner, self._codec, self._piece, self._dtype, self._kind = tuner, tuner.codec, piece, dtype, kind
        self.size = self._codec.payload_bytes(piece, dtype)  # bytes of a payload
        self.padded = -(-self.size // 8) * 8  # the same, as a multiple of 8

    def rows(self, *numbers: int) -> Tensor:
        """Of zeros, (*numbers, bytes)."""
        return torch.zeros(*numbers, HEAD + self.padded, dtype=torch.uint8)

    def payloads(self, rows: Tensor) -> Tensor:
        return rows[..., HEAD : HEAD + self.size]

    def decoded(self, payload: Tensor) -> Tensor:
        return self._codec.decode(self._encoded(payload), self._piece, self._dtype)

    def coded_size(self, payload: Tensor) -> float:
        """The size of what was rounded for it."""
        return self._tuner.coded_size(self._encoded(payload), self._piece)

    def mean(self, rows: Tensor, weights: Mapping[int, float]) -> tuple[Tensor, float]:
        """The weighted mean (piece,) of these workers' rows, and the size of what was rounded for it."""
        unit = next(one for one in weights.values() if one)
        total = sum(weight / unit for weight in weights.values())
        mean, error = torch.zeros(self._piece, dtype=self._dtype), 0.0
        for worker, weight in weights.items():
            if weight:
                payload = self.payloads(rows[worker])
                mean.add_(self.decoded(payload), alpha=weight / unit)
                error += (weight / unit / total) ** 2 * self.coded_size(payload)
        return mean.div_(total), error

    def _encoded(self, payload: Tensor) -> Tensor:
        return payload if self._kind == torch.uint8 else payload.view(self._kind)


def heads_of(rows: Tensor, workers: Sequence[int]) -> dict[int, Head]:
    """By worker, the head of its row."""
    at = HEAD - 4 * NUM_NUMBERS
    own = rows[:, :at].contiguous().view(torch.float64).tolist()
    numbers = rows[:, at:HEAD].contiguous().view(torch.float32).tolist()
    return {worker: Head._make([*own[worker], numbers[worker]]) for worker in workers}
