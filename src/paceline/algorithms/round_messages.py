"""What workers tell each other in a round besides their vectors: a header with every mean, and reports if they are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

_EXACT = 2**24  # float32 holds whole numbers up to here


class Header(NamedTuple):
    """What a worker says with a mean.

    The members' `numbers` are added up, in float32 if they travel in the first elements of a flat vector, which are no
    parameter's. `Heard` is computed from the sums.
    """

    has_report: bool = False  # or: this worker has something to report
    digest: int = 0  # equal: of vectors that should be the same on all workers; less than `num_digests`
    samples: float = 0.0  # sum

    @property
    def numbers(self) -> tuple[float, ...]:
        return float(self.has_report), float(self.digest), float(self.digest**2), self.samples

    @staticmethod
    def num_digests(num_workers: int) -> int:
        """So many that sums of their squares are exact in float32: 2,896 for two workers."""
        return math.isqrt(_EXACT // num_workers)


class Heard(NamedTuple):
    """What the headers of all members say."""

    has_report: bool  # any of them
    is_equal: bool  # all digests
    samples: float

    @classmethod
    def of(cls, numbers: Sequence[float], num_members: int) -> Heard:
        """From the sums of the members' numbers: digests are equal if and only if (sum d)^2 = m sum d^2.

        >>> Heard.of([a + b for a, b in zip(Header(digest=7).numbers, Header(True, 7, 32.0).numbers)], 2)
        Heard(has_report=True, is_equal=True, samples=32.0)
        """
        reports, digests, squares, samples = numbers
        return cls(reports > 0, digests**2 == num_members * squares, samples)


class Report(NamedTuple):
    """Where a worker is, in numbers that float64 holds exactly."""

    round: float
    step: float
    digest: float  # of the vectors
    rates: float  # a digest of the learning rates; 0: they may differ
    closure: float  # 0: unknown; 1: its loop passed none to `step`; 2: it passed one
    comes: float = 0.0  # the incarnation of its replacement, if the first worker accepts one

    def is_like(self, other: Report) -> bool:
        """Whether both workers have the same vectors and learning rates."""
        return self.digest == other.digest and (self.rates == other.rates or 0.0 in (self.rates, other.rates))


class Reports:
    """One report per worker. Each worker fills its own column of zeros, so that a sum over workers gathers all."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers  # (number of fields * num_workers,), float64: a row for each field
        self._rows = numbers.view(len(Report._fields), -1)

    @classmethod
    def of(cls, worker: int, report: Report, num_workers: int) -> Reports:
        """Those of one worker, to be added to the others'."""
        reports = cls(torch.zeros(len(Report._fields) * num_workers, dtype=torch.float64))
        reports[worker] = report
        return reports

    @property
    def accepted(self) -> dict[int, int]:
        """The newcomers that the first worker accepts; worker id: incarnation."""
        return {worker: int(n) for worker, n in enumerate(self._rows[-1].tolist()) if n}

    def accept(self, newcomers: Mapping[int, int]) -> None:
        """Reports, as the first worker, whom it accepts."""
        for worker, incarnation in newcomers.items():
            self._rows[-1, worker] = incarnation

    def rows(self, members: Sequence[int]) -> list[list[float]]:
        """The members' numbers, by field."""
        return [row[list(members)].tolist() for row in self._rows]

    def __getitem__(self, worker: int) -> Report:
        return Report(*self._rows[:, worker].tolist())

    def __setitem__(self, worker: int, report: Report) -> None:
        self._rows[:, worker] = torch.tensor(report, dtype=torch.float64)
