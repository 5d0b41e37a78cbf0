"""The layout that cuts a model of this package's layers over a mesh of workers, and replicates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.errors import UsageError
from paceline.model_parallel.tensor.shapes import Grid, Line, Mode, check_mode
from paceline.specs.bounds import COUNT, COUNT_FROM_0
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Matrices cut over a line or a grid of workers: tensor parallelism, in 1, 2 or 2.5 dimensions.

    The model consists of layers of `paceline.model_parallel`, built on `Mesh.alone()`. With k times as many workers as the
    mesh has, there are k replicas of it: workers 0 to p - 1 are the first. Workers of a mesh have the same batches, other
    replicas have others. The algorithm averages across replicas, between the workers with the same parts; under `downpour`,
    each part has its own servers.

    Costs per step: those of `Line` and `Grid`; the algorithm's, for a worker's part of the parameters. Gradients are summed
    along a grid's rows and depth in buckets of 25 MiB.
    Use when: matrices are too large for one worker. Not: `hybrid`, which cuts some linear layers of any model.

    Args:
        line: workers in a line (1-D).
        q: the side of the square (2-D).
        depth: squares, which share the batch (2.5-D).
        mode: of a grid's products. `allgather` collects the blocks of a row and of a column, and multiplies once; `summa` is
            the papers' loop of broadcasts, which holds two blocks at a time and sends as many bytes.
    """

    line: Annotated[int, COUNT_FROM_0] = 0
    q: Annotated[int, COUNT_FROM_0] = 0
    depth: Annotated[int, COUNT] = 1
    mode: Mode = "allgather"

    worker_kind: ClassVar[str] = "paceline.model_parallel.sharded_worker:ShardedWorker"

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.line) == bool(self.q) or (self.line and self.depth > 1):
            raise UsageError(
                "A tensor layout is a line or a grid: write tensor(line=4), tensor(q=2), or tensor(q=2, depth=2)."
            )
        check_mode(self.mode, self.shape)

    @property
    def shape(self) -> Line | Grid:
        return Line(self.line) if self.line else Grid(self.q, self.depth)

    def replicas(self, num_workers: int) -> int:
        """The number of meshes that this many workers form.

        Raises:
            UsageError: not a whole number.
        """
        shape = self.shape
        if num_workers % shape.workers:
            raise UsageError(
                f"{str(shape).capitalize()} needs {shape.workers} workers for each replica, but there are "
                f"{num_workers}: start a multiple of {shape.workers}, or choose another mesh."
            )
        return num_workers // shape.workers
