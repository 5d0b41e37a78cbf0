"""What travels with a worker's vectors in a round of messages."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from paceline.ports.ports import NO_NUMBERS


class Purpose(IntEnum):
    """What a round is for."""

    STEP = 0
    SUM = 1
    END = 2


_PLACES = ("a step", "worker.sum or worker.mean", "the end of its loop")  # by purpose


class RoundHeader(NamedTuple):
    """The numbers before a worker's vectors.

    >>> RoundHeader.of(RoundHeader(2.0, Purpose.SUM, 40).vector())
    RoundHeader(weight=2.0, purpose=<Purpose.SUM: 1>, num_bytes=40, numbers=(0.0, 0.0, 0.0, 0.0))
    """

    weight: float = 1.0  # of the worker's vectors in a mean
    purpose: Purpose = Purpose.STEP
    num_bytes: int = 0  # of all vectors
    numbers: tuple[float, ...] = NO_NUMBERS  # which are added up

    @classmethod
    def of(cls, vector: torch.Tensor) -> RoundHeader:
        """The inverse of `vector`."""
        weight, purpose, num_bytes, *numbers = vector.tolist()
        return cls(weight, Purpose(int(purpose)), int(num_bytes), tuple(numbers))

    def vector(self) -> torch.Tensor:
        """(7,), float64."""
        return torch.tensor([*self[:-1], *self.numbers], dtype=torch.float64)

    def why_unlike(self, own: RoundHeader, worker: int) -> str:
        """Why this header is of another round than `own`, the header of `worker`; empty if it is of the same round."""
        if (self.purpose, self.num_bytes) == (own.purpose, own.num_bytes):
            return ""
        what = f"and not at {_PLACES[own.purpose]} as worker {worker}"
        if self.purpose == own.purpose:
            what = "with vectors of another length"
        return f"is at {_PLACES[self.purpose]}, {what}: all must make as many steps, and as many calls of worker.sum"
