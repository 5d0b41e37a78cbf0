"""A worker's part of a model on a mesh, in a run: it is cut when the run begins, and whole again when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.loop.guards.noted_gradients import NotedGradients
from paceline.model_parallel.axes import LoneCollectives
from paceline.model_parallel.sharded_part import ShardedPart
from paceline.model_parallel.tensor.gradients import GradientMeans
from paceline.model_parallel.tensor.layers import Attention, Dropout, cut_modules
from paceline.model_parallel.tensor.layout import TensorParallel
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line
from paceline.model_parallel.tensor.state import clip_grad_norm, placements_of
from paceline.optim.sharding import REPLICAS, AxisShape
from paceline.ports.ports import Ports
from paceline.ports.rooted import RootedCollectives


class WorkerPart(ShardedPart):
    """Implements `LayoutPart` for a model of layers on a mesh.

    Several workers of a mesh hold equal copies of some parameters, such as a normalisation's gain on a line. If a codec
    makes them differ, or each part's servers apply gradients in another order, they are set to the values of the first of
    these workers after every update or fetch.

    Args:
        model: whole, on a mesh of one worker, and the same on all workers; it is cut here.
        worker_id: this worker; p consecutive workers are a mesh.

    Raises:
        UsageError: the model's layers are not on such a mesh, or the layout does not divide them.
    """

    keeps_random_alike = True

    def __init__(self, layout: TensorParallel, model: nn.Module, worker_id: int, num_workers: int, seed: int) -> None:
        self._layout, self._seed = layout, seed
        parts, replicas = layout.shape.workers, layout.replicas(num_workers)
        self.dealt = worker_id // parts, replicas  # as of `LayoutPart`
        self.is_recorded = not worker_id % parts
        self.mesh = check_model(model, layout.shape)  # the model's
        super().__init__(model, {**layout.shape.axes, REPLICAS: AxisShape(replicas, parts)}, worker_id)
        # The layers name the placements of parameters only once they are on the new mesh.
        self._connect_mesh()
        try:
            named = placements_of(model)[1]
            self._divide({one: named[name] for name, one in model.named_parameters()})
        except UsageError:
            self.mesh.disconnect()
            raise
        self._noted: NotedGradients | None = None

    def _connect_mesh(self) -> None:
        self.mesh.connect(self._layout.shape, self.along, *self.dealt, mode=self._layout.mode)

    def begin(self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm) -> Ports[Any]:
        self._connect(axes)
        self._connect_mesh()
        self._noted = NotedGradients(self.binding.parameters)
        replica, replicas = self.dealt
        is_coded = replicas > 1 and algorithm.is_coded
        return replace(
            ports,
            worker_id=replica,
            num_workers=replicas,
            random=Random(f"{self._seed}/{replica}"),
            collectives=axes.get(REPLICAS, LoneCollectives()),
            shared=_KeptAlike(ports.shared, self._make_alike) if is_coded else ports.shared,
            fetched=self._make_alike,
        )

    @property
    def pending(self) -> GradientMeans:
        return self.mesh.gradients

    def clip(self, max_norm: float) -> float:
        norm = float(clip_grad_norm(self.model, max_norm))
        assert self._noted is not None
        for parameter in self.binding.parameters:
            self._noted.note(parameter)
        return norm

    def has_changed_gradients(self) -> bool:
        return self._noted is not None and self._noted.have_changed()

    def remove(self) -> None:
        self.mesh.gradients.remove()
        if self._noted is not None:
            self._noted.remove()

    def _end(self) -> None:
        super()._end()
        self.mesh.disconnect()

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
            "A layout cuts a model that was built whole, but this one is on a mesh of several workers, or on several "
            "meshes: give all of its layers one mp.Mesh.alone()."
        )
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            module.local_heads(shape)
        if isinstance(module, Dropout) and module.axis not in (None, "features", "heads", *shape.axes):
            raise UsageError(
                f"The dropout {name} is cut along {module.axis!r}, which {shape} does not have: give it axis='features', or"
                " 'heads'."
            )
    return mesh


def check_algorithm(algorithm: Algorithm) -> None:
    """Rejects an algorithm without rounds, or one in which workers of a mesh could decide differently."""
    needs, spec = algorithm.needs, registry.spec(algorithm)
    if algorithm.serves_parts and needs.copies > 1:
        raise UsageError(
            f"{spec} does not work with a tensor layout, whose servers have no second copies: leave out durability=replica."
        )
    if algorithm.serves_parts:
        return
    if not algorithm.lockstep or needs.mailbox or needs.kind != "replicated":
        raise UsageError(
            f"{spec} does not work with a tensor layout, whose workers need each other in every layer: choose "
            "all-reduce, lockstep, local-sgd, da-sgd or diloco, which average across its replicas, or downpour, whose "
            "servers hold the parts."
        )
    if algorithm.by_speed or getattr(algorithm, "delay", None) == "auto":
        raise UsageError(
            f"{spec} depends on each worker's own measurements, which would differ among workers that share a model: "
            "leave out shares=auto, and give a delay in steps."
        )
