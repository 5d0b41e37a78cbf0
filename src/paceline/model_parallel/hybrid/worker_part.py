"""A worker's part of a model under a layout, and its place among the workers, over any carrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.model_parallel.counted import Counted, Traffic
from paceline.model_parallel.hybrid.cut_model import CutModel
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.mesh import Axis, Mesh
from paceline.model_parallel.hybrid.plan import CutPlan, plan_cuts
from paceline.optim.flat import FlatBinding
from paceline.optim.settings import check_elementwise
from paceline.optim.sharding import REPLICAS, AxisShape
from paceline.ports.ports import Collectives, Ports, Shards
from paceline.ports.rooted import RootedCollectives

__all__ = ["WorkerPart", "check_algorithm", "check_optimizer_of"]


class WorkerPart:
    """A layout's state in a membership: the whole model's initial values, the cut model, and the mesh; a `LayoutPart`.

    Args:
        model: whole, and the same on all workers; it is cut here.
        layout: how to cut it.
        worker_id: this worker.
        num_workers: of the run.
        seed: of the run.

    Attributes:
        cut: the model.
        plan: how it is cut.
        whole: the whole model's initial flat vector (W,); released by `begin`.
        binding: of the worker's own vector.
        sharding: how that vector is part of the whole; None: it is all of it.
        axes: along which workers are related, by name.
        dealt: this worker's index among those that share the batches, and their number.
        without_batch: takes part in the others' passes, in a round without a batch.
        repeats: as of `LayoutPart`.
    """

    is_recorded = True
    keeps_random_alike = False
    pending = None

    def __init__(self, model: nn.Module, layout: HybridParallel, worker_id: int, num_workers: int, seed: int) -> None:
        self.plan: CutPlan = plan_cuts(model, layout, num_workers)
        self._worker_id, self._num_workers = worker_id, num_workers
        whole = FlatBinding(model.parameters(), on_any_device=True)
        self.whole: torch.Tensor | None = whole.zeros()
        whole.read(self.whole)
        self.cut = CutModel(model, self.plan, worker_id, seed)
        self.binding = FlatBinding(self.cut.parameters, on_any_device=True, num_cut=self.cut.num_cut)
        self.sharding = self.cut.sharding if self.cut.num_cut else None
        parts = self.plan.parts
        self.axes: Mapping[str, AxisShape] = {
            "group": AxisShape(parts),
            REPLICAS: AxisShape(num_workers // parts, parts),
        }
        self.dealt = worker_id, num_workers
        self.without_batch = self.cut.empty_pass
        self.repeats: Callable[[], bool] = bool
        self.traffic = Traffic()

    def begin(
        self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm, *, carrier_counts: bool
    ) -> Ports[Any]:
        self.whole = None
        counts = None if carrier_counts else ports.counts
        parts = self.plan.parts
        groups = self._num_workers // parts

        def counted(inner: Collectives | None, axis: str, size: int, place: int) -> Counted | None:
            return Counted(inner, axis, size, place, self.traffic, counts) if inner is not None else None

        replica, place = divmod(self._worker_id, parts)
        everybody = counted(ports.collectives, "all", self._num_workers, self._worker_id)
        replicas = counted(axes.get(REPLICAS), REPLICAS, groups, replica)
        within = counted(axes.get("group"), "group", parts, place)
        group = Axis(within, place, parts, self.binding.num_elements)
        alone = self._num_workers == 1
        self.cut.connect(
            Mesh(
                self._worker_id,
                self._num_workers,
                groups,
                None if alone else everybody,
                group,
                replicas,
                self.traffic,
            ),
            lambda: ports.shared.version,
            lambda: self.repeats(),
        )
        shards = Shards(self.binding.cut_from, replicas, self.cut.samples_of_group) if self.cut.num_cut else None
        return replace(ports, collectives=everybody, shards=shards)

    def clip(self, max_norm: float) -> float:
        """Clips the gradients to a norm of at most `max_norm`; returns the norm before. All workers call it."""
        cut = self.cut
        norm = cut.norm([one.grad for one in cut.parameters])
        with torch.no_grad():
            for parameter in cut.parameters:
                if parameter.grad is not None and norm > max_norm:
                    parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def has_changed_gradients(self) -> bool:
        """Whether gradients have changed in a way that the replica's own check does not see."""
        return False

    def remove(self) -> None:
        self.cut.remove()

    def whole_of(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.sharding is None else self.sharding.whole_of(self.cut.mesh.group.all_gather(x))

    def make_state_whole(self, optimizer: torch.optim.Optimizer) -> None:
        self.cut.make_state_whole(optimizer)

    def make_whole(self) -> None:
        self.cut.make_whole()

    def take_whole(self, x: torch.Tensor) -> None:
        self.cut.take_whole(x)


def check_algorithm(algorithm: Algorithm) -> None:
    """Rejects an algorithm that does not support shards."""
    if not algorithm.takes_shards:
        raise UsageError(
            f"{registry.spec(algorithm)} cannot average shards: hybrid goes with all-reduce without sharded, shares or codec."
        )


def check_optimizer_of(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer that combines elements of a parameter, of which a worker has only some."""
    check_elementwise(
        optimizer,
        "Under a layout a worker has a part of each cut layer only, and {optimizer} may keep state or make decisions of whole"
        " ones",
        but={"Adagrad"},
    )
    if isinstance(optimizer, torch.optim.Adagrad):
        raise UsageError(
            "Under a layout the optimizer begins without state, and Adagrad has its sums as soon as it is made: choose"
            " another, such as RMSprop or Adam."
        )
    if optimizer.state:
        raise UsageError(
            "Under a layout the optimizer begins without state, since that of whole layers would have to be cut: attach before"
            " the first step, or resume the run by its checkpoint."
        )
