"""What workers tell each other in a round besides their vectors: a header with every mean, and reports if they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

_EXACT = 2**24  # float32 holds whole numbers up to here
_SHORT = 2**8


class Header(NamedTuple):
    """What a worker says with a mean; or what all have said, as sums.

    It travels as one number. Without `samples` the sum over all workers is exact in float32, also in a vector's padding; with
    them, it is exact in float64.
    """

    reports: int = 0  # 1: this worker has something to report
    digest: int = 0  # of vectors that should be the same on all workers; less than `num_digests`
    samples: int = 0

    @staticmethod
    def num_digests(num_workers: int) -> int:
        """8 bits of a digest; fewer above 255 workers, and none above 2,895."""
        return max(1, min(_SHORT, _EXACT // (num_workers * (1 + num_workers))))

    def packed(self, num_workers: int) -> float:
        return float(self.samples * _EXACT + self.digest * (1 + num_workers) + self.reports)

    @classmethod
    def unpacked(cls, total: float, num_workers: int) -> Header:
        samples, rest = divmod(round(total), _EXACT)
        digest, reports = divmod(rest, 1 + num_workers)
        return cls(reports, digest, samples)


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
    """Reports by worker, gathered by adding them up.

    Args:
        numbers: (number of fields * num_workers,), float64: a row for each field.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
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
