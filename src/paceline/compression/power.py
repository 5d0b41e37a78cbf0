"""PowerSGD: averages low-rank factors of the gradients of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Moves, key_of
from paceline.errors import UsageError
from paceline.specs.bounds import ABOVE_0, COUNT_FROM_0, RANK

_SEED = 20190531  # of the first factors: the same on all workers


@dataclass(frozen=True, kw_only=True)
class Power(Codec):
    """Sends a matrix's gradient (n, m) as factors of rank r, r (n + m) numbers, with error feedback.

    The workers average M Q, orthonormalise that to P, average M' P, and all take P (M' P)': one power iteration per step,
    starting where the last one ended. Vectors, and matrices that would not become `min_rate` times smaller, are sent
    uncompressed.

    Costs: two all-reduces per step, one after the other; two products with each matrix; one vector of memory.
    Use when: matrices are large and their gradients have low rank, as in networks with wide layers.
    Not a codec of vectors: it computes averages itself, and servers cannot use its factors.

    Args:
        rank: r; with 1 to 4, ten to a hundred times fewer bytes.
        min_rate: a matrix is sent as factors if they are this many times smaller.
        warmup_steps: number of first steps sent uncompressed: early gradients change too fast for the factors to follow.

    Differs from the paper: a worker's error feedback is what its own matrix lacks, M - P P' M, not the difference from the
    mean of all: the sum over workers is the same, and no deviation remains after a round in which a worker has no batch or a
    smaller one. Means are weighted by samples, as in `all-reduce`. As in the paper, a convolution's filters are a matrix with
    one row per output channel. P is always orthonormal: a column that is zero, or depends on those before it, is drawn again,
    from a seed that all workers share. A column of Q that would become zero keeps its last value, for the next step that uses
    its matrix. Each column of Q is divided by its largest element, which does not change the mean, so that gradients can have
    any size.

    Reference: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        NeurIPS 2019, arXiv:1905.13727, Algorithms 1 and 2.
    """

    rank: Annotated[int, RANK] = 4
    min_rate: Annotated[float, ABOVE_0] = 3.0
    warmup_steps: Annotated[int, COUNT_FROM_0] = 50

    @property
    def moves(self) -> Moves:
        return Moves(4.0 + 2.0 * self.rank, 4.0 + self.rank)  # the products, and what they lack


class Factored(NamedTuple):
    """A matrix sent as factors: elements `first` to `first + rows * columns` of a flat vector."""

    first: int
    rows: int
    columns: int

    @property
    def length(self) -> int:
        return self.rows * self.columns

    def of(self, vector: Tensor) -> Tensor:
        """The matrix (rows, columns) in a flat vector."""
        return vector[self.first : self.first + self.length].view(self.rows, self.columns)

    def first_factor(self, rank: int) -> Tensor:
        """(rank, columns), drawn; the same on all workers."""
        generator = torch.Generator().manual_seed(_SEED + self.first)
        return torch.randn(rank, self.columns, generator=generator)

    def orthonormalize(self, left: Tensor, count: int) -> None:
        """Makes the rows of `left` (rank, rows) orthonormal, in place; draws dead ones again, the same on all workers.

        `torch.rand` gives the same bits on every processor, which `torch.randn` does not.
        """
        from paceline.compression import kernels

        generator = torch.Generator().manual_seed(key_of(_SEED, self.first, count))
        row = 0
        while (row := kernels.orthonormalize(left.numpy(), row)) < len(left):
            left[row] = torch.rand(self.rows, generator=generator, dtype=left.dtype) - 0.5


def factored(power: Power, shapes: Sequence[tuple[int, ...]], firsts: Sequence[int]) -> list[Factored]:
    """The parameters, of these shapes and first elements in a flat vector, that are sent as factors; possibly none."""
    return [
        one
        for one in _matrices(shapes, firsts)
        if power.rank <= min(one.rows, one.columns)
        and power.min_rate * power.rank * (one.rows + one.columns) <= one.length
    ]


def check_rank(power: Power, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuses a rank so large that no parameter of the model would be sent as factors."""
    firsts = [0] * len(shapes)
    if not factored(power, shapes, firsts):
        matrices = _matrices(shapes, firsts)
        largest = max((min(one.rows, one.columns) for one in matrices), default=0)
        what = f"the largest rank of its matrices is {largest}" if matrices else "it has no matrix"
        raise UsageError(
            f"power(rank={power.rank}) makes no part of this model smaller by {power.min_rate:g}, because {what}: use "
            "a lower rank, or qsgd."
        )


def _matrices(shapes: Sequence[tuple[int, ...]], firsts: Sequence[int]) -> list[Factored]:
    return [
        Factored(first, shape[0], int(torch.Size(shape).numel()) // shape[0])
        for shape, first in zip(shapes, firsts, strict=True)
        if len(shape) > 1 and torch.Size(shape).numel()
    ]
