"""A worker's part of a model on a mesh, in a run: it is cut when the run begins, and whole again when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.loop.noted_gradients import NotedGradients
from paceline.model_parallel.counted import Counted, Traffic
from paceline.model_parallel.tensor.axes import Alone, Axis
from paceline.model_parallel.tensor.gradients import GradientMeans
from paceline.model_parallel.tensor.layers import Attention, Dropout, cut_modules
from paceline.model_parallel.tensor.layout import TensorParallel
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.placement import Placement
from paceline.model_parallel.tensor.run_axes import LoneCollectives, RunAxis
from paceline.model_parallel.tensor.shapes import Grid, Line, Mode
from paceline.model_parallel.tensor.state import clip_grad_norm, placements_of
from paceline.optim.flat import FlatBinding
from paceline.optim.sharding import EXCHANGED_ELEMENTS, REPLICAS, AxisShape, Shard, Sharding
from paceline.ports.ports import Ports
from paceline.ports.rooted import RootedCollectives

__all__ = ["WorkerPart", "check_algorithm"]


class WorkerPart:
    """Implements `LayoutPart` for a model of layers on a mesh.

    Several workers of a mesh compute replicated parameters, such as a normalisation's gain on a line, alike. If a codec makes
    them differ, they are set to the values of the first of these workers after every update.

    Args:
        model: whole, on a mesh of one worker, and the same on all workers; it is cut here.
        layout: how to cut it.
        worker_id: this worker; p consecutive workers are a mesh.
        num_workers: of the run.
        seed: of the run.

    Attributes:
        mesh: the model's.

    Raises:
        UsageError: the model's layers are not on such a mesh, or the layout does not divide them.
    """

    keeps_random_alike = True
    without_batch = None  # workers of a mesh run out of batches together

    def __init__(self, model: nn.Module, layout: TensorParallel, worker_id: int, num_workers: int, seed: int) -> None:
        self.repeats: Callable[[], bool] = bool
        self.model = model
        self._shape: Line | Grid = layout.shape if num_workers > 1 else Line(1)  # alone, as without a launcher
        self._mode: Mode = layout.mode if num_workers > 1 else "allgather"
        parts = self._shape.workers
        replicas = num_workers // parts if num_workers == 1 else layout.replicas(num_workers)
        self._seed = seed
        replica, self._place = divmod(worker_id, parts)
        self.dealt = replica, replicas
        self.is_recorded = not self._place
        mesh_axes = _mesh_axes(self._shape)
        self.axes: Mapping[str, AxisShape] = {**mesh_axes, REPLICAS: AxisShape(replicas, parts)}
        self.mesh = check_model(model, self._shape)
        whole = FlatBinding(model.parameters(), on_any_device=True)
        self.whole: Tensor | None = whole.zeros()
        whole.read(self.whole)
        # The layers name the placements of parameters only once they are on the new mesh.
        places: dict[str, Axis] = {name: _Place(one, self._place) for name, one in mesh_axes.items()}
        self._shapes = {one: one.shape for one in model.parameters()}
        self._frozen = {one: one.data for one in model.parameters() if not one.requires_grad}
        self._places = places
        self.mesh.connect(self._shape, places, replica, replicas, mode=self._mode)
        try:
            self._placed = dict(self._placements())
            self._cut(self._placed)
        except UsageError:
            self.mesh.disconnect()
            raise
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        self.sharding = self._sharding(whole) if parts > 1 else None
        self.traffic = Traffic()
        self._noted: NotedGradients | None = None

    def begin(
        self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm, *, carrier_counts: bool
    ) -> Ports[Any]:
        """As of `LayoutPart`: the program sees one worker per replica, and no mesh."""
        self.whole = None
        for parameter, whole in self._frozen.items():  # worker 0's values by now
            parameter.data = whole
        self._cut(self._frozen)
        counts = None if carrier_counts else ports.counts
        most_bytes = max(self.binding.num_elements, EXCHANGED_ELEMENTS) * self.binding.dtype.itemsize

        def counted(name: str, place: int) -> Counted:
            return Counted(axes[name], name, self.axes[name].size, place, self.traffic, counts)

        on_mesh: dict[str, Axis] = {}
        for name, shape in self.axes.items():
            if name == REPLICAS:
                continue
            place = shape.place(self._place)
            is_alone = shape.size == 1
            on_mesh[name] = Alone() if is_alone else RunAxis(counted(name, place), place, shape.size, most_bytes)
        replica, replicas = self.dealt
        self.mesh.connect(self._shape, on_mesh, replica, replicas, mode=self._mode)
        self._noted = NotedGradients(self.binding.parameters)
        is_coded = replicas > 1 and algorithm.is_coded
        return replace(
            ports,
            worker_id=replica,
            num_workers=replicas,
            random=Random(f"{self._seed}/{replica}"),
            collectives=LoneCollectives() if replicas == 1 else counted(REPLICAS, replica),
            shared=_KeptAlike(ports.shared, self._make_alike) if is_coded else ports.shared,
        )

    @property
    def pending(self) -> GradientMeans:
        return self.mesh.gradients

    def clip(self, max_norm: float) -> float:
        """As of `LayoutPart`; workers of a mesh call it together."""
        norm = float(clip_grad_norm(self.model, max_norm))
        assert self._noted is not None
        for parameter in self.binding.parameters:
            self._noted.note(parameter)
        return norm

    def has_changed_gradients(self) -> bool:
        """Whether a gradient has changed since backward, or the last clipping; called once per step."""
        return self._noted is not None and self._noted.have_changed()

    def remove(self) -> None:
        self.mesh.gradients.remove()
        if self._noted is not None:
            self._noted.remove()

    def whole_of(self, x: Tensor) -> Tensor:
        return x if self.sharding is None else self.sharding.whole_of(self.mesh.axes["world"].all_gather(x))

    def make_state_whole(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, placement in self._placed.items():
            state = optimizer.state.get(parameter, {}) if parameter.requires_grad else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    state[name] = placement.gather(value, self.mesh.axes)

    def make_whole(self) -> None:
        for parameter, placement in self._placed.items():
            if parameter not in self._frozen:
                self._put_back(parameter, placement.gather(parameter.data, self.mesh.axes))
        self._end()

    def take_whole(self, x: Tensor) -> None:
        if self.sharding is not None:
            for parameter, shard in zip(self.binding.parameters, self.sharding.shards, strict=True):
                numel = torch.Size(shard.shape).numel()
                self._put_back(parameter, x[shard.whole_at : shard.whole_at + numel].view(shard.shape).clone())
        self._end()

    def _end(self) -> None:
        for parameter, whole in self._frozen.items():
            self._put_back(parameter, whole)
        self.mesh.disconnect()

    def _put_back(self, parameter: nn.Parameter, whole: Tensor) -> None:
        if parameter.shape != whole.shape:
            parameter.grad = None
        parameter.data = whole

    def _placements(self) -> Iterator[tuple[nn.Parameter, Placement]]:
        named = placements_of(self.model)[1]
        for name, parameter in self.model.named_parameters():
            yield parameter, named[name]

    def _cut(self, parameters: Iterable[nn.Parameter]) -> None:
        parts = {one: self._placed[one].cut(one.data, self._places) for one in parameters}
        for parameter, part in parts.items():
            if part.shape != parameter.shape:
                parameter.data, parameter.grad = part.clone(memory_format=torch.contiguous_format), None

    def _sharding(self, whole: FlatBinding) -> Sharding:
        shards = []
        for parameter, whole_at, at in zip(self.binding.parameters, whole.offsets, self.binding.offsets, strict=True):
            cuts = tuple((dimension, self.axes[axis]) for dimension, axis in self._placed[parameter].cuts)
            shards.append(Shard(whole_at, at, tuple(self._shapes[parameter]), cuts))
        own = self.binding.num_elements
        axes = {name: one for name, one in self.axes.items() if name != REPLICAS}
        return Sharding(self._shape.workers, whole.num_elements, own, own, tuple(shards), axes)

    def _make_alike(self, x: Tensor) -> None:
        """Sets the replicated parts of `x` (P,) to the values of the first worker of the mesh that has them."""
        mesh, together = self.mesh, dict[tuple[str, ...], list[Tensor]]()
        for parameter, view in zip(self.binding.parameters, self.binding.views(x), strict=True):
            cut = {axis for _, axis in self._placed[parameter].cuts}
            alike = tuple(
                name for name, one in mesh.axes.items() if name not in cut and name != "world" and one.size > 1
            )
            if alike:
                together.setdefault(alike, []).append(view)
        for names, views in together.items():
            flat = torch.cat([one.flatten() for one in views])
            for name in names:
                mesh.axes[name].start_broadcast(flat, 0).wait()
            for view, values in zip(views, flat.split([one.numel() for one in views]), strict=True):
                view.copy_(values.view_as(view))


class _Place(Alone):
    """A worker's position along an axis that is not connected yet."""

    def __init__(self, shape: AxisShape, worker: int) -> None:
        self.size, self.index = shape.size, shape.place(worker)


class _KeptAlike:
    """Shared parameters that call a function after each change, while they are still marked as being written."""

    def __init__(self, shared: Any, after: Any) -> None:
        self._shared, self._after = shared, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._shared.writing():
            yield
            self._after(self._shared.x)


def check_model(model: nn.Module, shape: Line | Grid) -> Mesh:
    """The mesh of one worker on which a model was built, if the shape divides the model.

    Raises:
        UsageError: it does not, or the model was built otherwise.
    """
    mesh = placements_of(model)[0]
    meshes = {id(one.mesh) for _, one in cut_modules(model)}
    if mesh.shape.workers > 1 or len(meshes) > 1:
        raise UsageError(
            "A layout cuts a model that was built whole, and this one is on a mesh of several workers, or on several meshes:"
            " give all of its layers one mp.Mesh.alone()."
        )
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.local_heads(shape)
        if isinstance(module, Dropout) and module.axis not in (None, "features", "heads", *_mesh_axes(shape)):
            raise UsageError(
                f"The dropout {name} is cut along {module.axis!r}, which {shape} does not have: give it axis='features', or"
                " 'heads'."
            )
    return mesh


def check_algorithm(algorithm: Algorithm) -> None:
    """Rejects an algorithm without rounds, or one in which workers of a mesh could decide differently."""
    needs, spec = algorithm.needs, registry.spec(algorithm)
    if not algorithm.lockstep or needs.mailbox or needs.kind != "replicated":
        raise UsageError(
            f"{spec} does not go with a tensor layout, whose workers need each other in every layer: choose all-reduce,"
            " lockstep, local-sgd, da-sgd or diloco, which average across its replicas."
        )
    if algorithm.by_speed or getattr(algorithm, "delay", None) == "auto":
        raise UsageError(
            f"{spec} goes by what each worker measures, on which workers that share a model would differ: leave out"
            " shares=auto, and give a delay in steps."
        )


def _mesh_axes(shape: Line | Grid) -> dict[str, AxisShape]:
    """Of a mesh, whose workers are numbered as `Mesh` says."""
    world = {"world": AxisShape(shape.workers)}
    if isinstance(shape, Line):
        return {**world, "line": AxisShape(shape.workers)}
    q, depth = shape.q, shape.depth
    return {**world, "depth": AxisShape(depth, q * q), "row": AxisShape(q, q), "column": AxisShape(q)}
