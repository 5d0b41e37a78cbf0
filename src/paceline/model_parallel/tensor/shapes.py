"""Arrangements of workers: a line, or a grid of q x q x depth; and which of them moves the fewest elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from paceline.errors import UsageError, shown
from paceline.optim.sharding import AxisShape

Mode = Literal["allgather", "summa"]

#: Of a transformer's layer, in units of batch x sequence x hidden and of hidden squared: inputs and weights of its products.
INPUTS, WEIGHTS = 7, 12


@dataclass(frozen=True)
class Line:
    """Workers in a line: matrices are cut in one dimension, activations between layers are complete on every worker.

    Costs of a transformer's layer: four all-reduces of batch x sequence x hidden elements for each forward and backward pass.
    Use when: there are few workers with fast links. Not: for many workers, whose activations it does not make smaller.

    Args:
        workers: how many.

    Reference: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053.
    """

    workers: int

    def __post_init__(self) -> None:
        _check_counts(self.workers)

    def __str__(self) -> str:
        return f"a line of {self.workers}"

    @property
    def axes(self) -> dict[str, AxisShape]:
        """Along which workers differ, by name; "world" has all of them."""
        return {"world": AxisShape(self.workers), "line": AxisShape(self.workers)}

    @property
    def batch_parts(self) -> int:
        """The number of parts into which a batch is cut."""
        return 1

    @property
    def hidden_parts(self) -> int:
        """The number of parts into which features, heads and the vocabulary are cut."""
        return self.workers

    @property
    def parameter_share(self) -> float:
        """The share of the matrices on each worker."""
        return 1 / self.workers

    def layer_elements(self, batch: int, sequence: int, hidden: int) -> Fraction:
        """Elements that each worker sends for a transformer's layer, forward and backward, by all-reduces in rings."""
        p = self.workers
        return Fraction(8 * (p - 1), p) * batch * sequence * hidden


@dataclass(frozen=True)
class Grid:
    """Workers in `depth` squares of q x q: matrices are cut in both dimensions, and so are activations.

    A worker (row i, column j, layer k of the depth) has block (i, j) of each matrix, as all layers have, and of activations
    the part k q + i of the batch and the part j of the features. With depth 1 this is Optimus's 2-D. The depth is data
    parallel: gradients are added up along it.

    Costs of a transformer's layer: see `layer_elements`; parameters take 1 / q^2, activations 1 / (q^2 depth).
    Use when: batch x sequence / depth is large compared to hidden, and there are many workers. Not: for four workers in one
    machine, where a line with its fewer messages is faster.

    Args:
        q: the side of the square.
        depth: squares.

    Differs from the paper: each worker has the whole bias of its column, not only row 0; their gradients are summed.

    Reference: Wang et al., "2.5-dimensional distributed model training" (SUMMA2.5-LM, later Tesseract), 2021,
        arXiv:2105.14500; depth 1: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus),
        2021, arXiv:2104.05343.
    """

    q: int
    depth: int = 1

    def __post_init__(self) -> None:
        _check_counts(self.q, self.depth)

    def __str__(self) -> str:
        return f"a grid of {self.q} x {self.q}" + (f" x {self.depth}" if self.depth > 1 else "")

    @property
    def workers(self) -> int:
        return self.q * self.q * self.depth

    @property
    def axes(self) -> dict[str, AxisShape]:
        """As of `Line`; along "column" the column differs, so those workers share a row."""
        q, depth = self.q, self.depth
        world = {"world": AxisShape(self.workers)}
        return {**world, "depth": AxisShape(depth, q * q), "row": AxisShape(q, q), "column": AxisShape(q)}

    @property
    def batch_parts(self) -> int:
        return self.q * self.depth

    @property
    def hidden_parts(self) -> int:
        return self.q

    @property
    def parameter_share(self) -> float:
        return 1 / self.q**2

    def layer_elements(self, batch: int, sequence: int, hidden: int) -> Fraction:
        """Elements that each worker sends for a transformer's layer, forward and backward, without vectors.

        Three times (q - 1) / q^2 (7 b s h / depth + 12 h^2), and the depth's all-reduce of the weights' gradients,
        2 (depth - 1) / depth 12 h^2 / q^2.
        """
        q, depth = self.q, self.depth
        products = Fraction(q - 1, q * q) * (Fraction(INPUTS * batch * sequence * hidden, depth) + WEIGHTS * hidden**2)
        return 3 * products + Fraction(2 * (depth - 1), depth) * Fraction(WEIGHTS * hidden**2, q * q)


def parse_mesh(text: str) -> Line | Grid:
    """A mesh as text.

    >>> parse_mesh("2x2"), parse_mesh("2x2x3"), parse_mesh("line 4")
    (Grid(q=2, depth=1), Grid(q=2, depth=3), Line(workers=4))

    Raises:
        UsageError: it is none.
    """
    words = text.strip().lower().replace("line", "").strip()
    try:
        numbers = [int(word) for word in words.split("x")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return Line(numbers[0])
    if len(numbers) in (2, 3) and numbers[0] == numbers[1] and "line" not in text.lower():
        return Grid(*numbers[1:])
    raise UsageError(f"{shown(text)} is not a mesh: write 'line 4', '2x2' or '2x2x2' (a square, times its depth).")


def check_mode(mode: str, shape: Line | Grid) -> None:
    """Rejects an unknown mode, or one that this mesh does not support."""
    if mode not in get_args(Mode):
        raise UsageError(f"{shown(mode)} is not a mode of multiplication: choose 'allgather' or 'summa'.")
    if mode == "summa" and isinstance(shape, Line):
        raise UsageError(
            "A line of workers multiplies without broadcasts: leave out mode='summa', or give a grid (q=2)."
        )


def choose_mesh(
    workers: int,
    batch: int,
    sequence: int,
    hidden: int,
    *,
    heads: int | None = None,
    vocabulary: int | None = None,
    largest_share: float = 1.0,
) -> Line | Grid:
    """The mesh of this many workers whose layers send the fewest elements, among those that divide the sizes.

    Counts only elements: on links with high latency, and for small models, a line's four large messages for each layer may
    be faster than a grid's many. The larger the batch, the deeper the chosen grid, and the more parameters each worker has:
    `largest_share` bounds them.

    Args:
        workers: all of them are used.
        batch: sequences of all workers.
        sequence: tokens of each.
        hidden: features.
        heads: of the attention, which the mesh must divide, too.
        vocabulary: likewise.
        largest_share: of the model's parameters on one worker.

    Raises:
        UsageError: no mesh of that size divides them.

    >>> choose_mesh(64, batch=16, sequence=2048, hidden=8192), choose_mesh(4, batch=1, sequence=128, hidden=512)
    (Grid(q=4, depth=4), Line(workers=4))
    """
    _check_counts(workers, batch, sequence, hidden)
    grids = [Grid(q, workers // q**2) for q in range(1, math.isqrt(workers) + 1) if workers % q**2 == 0]
    possible = [
        mesh
        for mesh in (Line(workers), *grids)
        if batch % mesh.batch_parts == 0
        and all(size % mesh.hidden_parts == 0 for size in (hidden, heads or 0, vocabulary or 0))
        and (isinstance(mesh, Line) or mesh.q > 1)  # q = 1: data parallel, which needs no mesh
        and mesh.parameter_share <= largest_share
    ]
    if not possible:
        raise UsageError(
            f"No mesh of {workers} workers divides a batch of {batch}, {hidden} features and the other sizes evenly: "
            "make them multiples of the number of workers, or allow each worker a larger share of the parameters."
        )
    return min(possible, key=lambda mesh: mesh.layer_elements(batch, sequence, hidden))


def _check_counts(*numbers: int) -> None:
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(
                f"{shown(number)} is not a size of a mesh, batch or model: give a whole number of 1 or more."
            )
