"""Workers as a line or a grid: this worker's position, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError
from paceline.membership.rendezvous import own_part
from paceline.model_parallel.axes import Axis
from paceline.model_parallel.placement import Placement, divided, part_of
from paceline.model_parallel.tensor.gradients import GradientMeans
from paceline.model_parallel.tensor.shapes import Grid, Line, Mode, check_mode, parse_mesh
from paceline.ports.ports import Counts
from paceline.system.torch_internals import default_store
from paceline.transport.axes import AxisCollectives, make_axes

_TIMEOUT_S = 1800.0  # of one operation, as torch.distributed's


class Mesh:
    """The workers of a tensor-parallel model, seen from one of them.

    `Mesh.open` creates it from torch.distributed's workers; pass it to layers. Worker k q^2 + i q + j of a grid is in row i,
    column j, layer k of the depth.

    Args:
        shape: a line or a grid.
        axes: by the names of the shape's.
        mode: how products on a grid are computed. "allgather" gathers a row's blocks and a column's, and multiplies once;
            "summa" is the papers' loop of broadcasts, whose two buffers take less memory and which sends as many bytes.
        seed: of parameters and dropout.
        bucket_bytes: size of the buckets of gradients that are averaged along the depth.

    Attributes:
        shape, axes, mode, seed, bucket_bytes: as given.
        gradients: averages them where needed.
        replica, replicas: this mesh's index, and the number of those that train the same model under a layout.
    """

    def __init__(
        self,
        shape: Line | Grid,
        axes: Mapping[str, Axis],
        *,
        mode: Mode = "allgather",
        seed: int = 0,
        bucket_bytes: int = 25 << 20,
    ) -> None:
        check_mode(mode, shape)
        self.seed = seed
        self.bucket_bytes = bucket_bytes
        self._streams = 0
        self.connect(shape, axes, mode=mode)

    @staticmethod
    def alone(*, seed: int = 0) -> Mesh:
        """The mesh of one worker. A model built on it is whole, until `attach(layout=...)` cuts it over the run's workers."""
        return Mesh(Line(1), {name: Axis() for name in Line(1).axes}, seed=seed)

    def connect(
        self,
        shape: Line | Grid,
        axes: Mapping[str, Axis],
        replica: int = 0,
        replicas: int = 1,
        *,
        mode: Mode = "allgather",
    ) -> None:
        """Turns this into mesh `replica` of `replicas` that train the same model; layers built on it change with it.

        The other arguments are the constructor's.
        """
        self.shape, self.axes = shape, dict(axes)
        self.mode: Mode = mode
        self.replica, self.replicas = replica, replicas
        self.gradients = GradientMeans(self.axes, self.bucket_bytes)

    def disconnect(self) -> None:
        """Turns this into a mesh of one worker again."""
        lone = Mesh.alone()
        self.connect(lone.shape, lone.axes)

    @staticmethod
    def open(
        shape: Line | Grid | str, *, mode: Mode = "allgather", seed: int = 0, bucket_bytes: int = 25 << 20
    ) -> Mesh:
        """The mesh of all of torch.distributed's workers, in its default group; without one, a mesh of one worker.

        Raises:
            UsageError: the mesh has another size.
        """
        shape = parse_mesh(shape) if isinstance(shape, str) else shape
        workers = dist.get_world_size() if dist.is_initialized() else 1
        if workers != shape.workers:
            raise UsageError(
                f"{str(shape).capitalize()} needs {shape.workers} workers, and there are {workers}: start"
                f" {shape.workers} (torchrun --nproc-per-node {shape.workers}), or choose another mesh."
            )
        collectives, worker = _collectives(shape) if workers > 1 else {}, dist.get_rank() if workers > 1 else 0
        axes = {name: Axis(collectives.get(name), one.size, one.place(worker)) for name, one in shape.axes.items()}
        return Mesh(shape, axes, mode=mode, seed=seed, bucket_bytes=bucket_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        if self.shape.workers > 1:
            return self  # a copy of a model is on the same workers
        memo[id(self)] = copy = Mesh(self.shape, self.axes, mode=self.mode, seed=self.seed)
        copy._streams = self._streams
        return copy

    @property
    def hidden(self) -> Axis:
        """The axis along which features, heads and the vocabulary are cut."""
        return self.axes[self.hidden_axis]

    @property
    def hidden_axis(self) -> str:
        return "line" if self.is_line else "column"

    @property
    def is_line(self) -> bool:
        """Whether matrices are cut in one dimension."""
        return isinstance(self.shape, Line)

    @property
    def batch_part(self) -> int:
        if isinstance(self.shape, Line):
            return 0
        return self.axes["depth"].index * self.shape.q + self.axes["row"].index

    def local_batch(self, whole: Tensor) -> Tensor:
        """This worker's part (its own, ...) of a batch (samples, ...) that all workers of the mesh have, a view.

        Raises:
            UsageError: the mesh does not divide it.
        """
        size = divided(len(whole), self.shape.batch_parts, "a batch")
        return whole.narrow(0, self.batch_part * size, size)

    def local_features(self, whole: Tensor) -> Tensor:
        """On a grid this worker's part of the last dimension, a view; all of it on a line."""
        return whole if self.is_line else part_of(whole, self.hidden, -1, "a number of features")

    @torch.no_grad()
    def mean(self, x: Tensor) -> Tensor:
        """The mean of the workers' `x`, such as a loss to report, without gradients; all workers call it together."""
        total = x.detach().clone()
        self.axes["world"].start_all_reduce(total).wait()
        return total / self.shape.workers

    def sum_over_batch(self, x: Tensor) -> Tensor:
        """`x`, summed in place over the workers that have the other samples."""
        for name in () if self.is_line else ("row", "depth"):
            self.axes[name].start_all_reduce(x).wait()
        return x

    def placement(self, *cuts: str | None, batch: tuple[str, ...] = ()) -> Placement:
        """The placement of a tensor with dimensions cut along `cuts`, and with gradients averaged along `batch`."""
        return Placement(tuple((at, axis) for at, axis in enumerate(cuts) if axis is not None), batch)

    def new_stream(self) -> tuple[int, int]:
        """The seed of the next parameter or dropout; equally built models get equal seeds on every mesh."""
        self._streams += 1
        return self.seed, self._streams


def _collectives(shape: Line | Grid) -> dict[str, AxisCollectives]:
    """Along each axis; a worker that gives up says so to all meshes of these workers."""
    store, worker, workers = own_part(default_store(), "mesh"), dist.get_rank(), dist.get_world_size()

    def make(group: Any, ranks: Sequence[int]) -> AxisCollectives:
        return AxisCollectives(group, ranks, store, worker, workers, timeout_s=_TIMEOUT_S, counts=Counts())

    return make_axes(shape.axes, worker, workers, _TIMEOUT_S, make, backend=None)
