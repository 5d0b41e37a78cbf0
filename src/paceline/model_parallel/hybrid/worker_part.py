"""A worker's part of a model under a layout, and its place among the workers, on whatever carries their messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.model_parallel.hybrid.cut_model import CutModel
from paceline.model_parallel.hybrid.layout import Hybrid, layout_registry
from paceline.model_parallel.hybrid.mesh import Axis, Counted, Mesh, Traffic
from paceline.model_parallel.hybrid.plan import CutPlan, plan_cuts
from paceline.optim.settings import check_elementwise
from paceline.ports.ports import Collectives, Ports, Shards
from paceline.vectors.flat import FlatBinding

__all__ = ["WorkerPart", "check_layout", "check_optimizer_of"]


class WorkerPart:
    """What a membership keeps of a layout: the whole model's first values, the cut model, and the mesh.

    Args:
        model: whole, and the same on all workers; it is cut here.
        layout: how.
        worker_id: this worker.
        num_workers: of the run.
        seed: of the run.

    Attributes:
        cut: the model.
        plan: how it is cut.
        whole: the whole model's flat vector (W,), as it was; let go of by `begin`.
        whole_elements: W.
        binding: of the worker's own vector.
    """

    def __init__(self, model: nn.Module, layout: Hybrid, worker_id: int, num_workers: int, seed: int) -> None:
        self.plan: CutPlan = plan_cuts(model, layout, num_workers)
        self._worker_id, self._num_workers = worker_id, num_workers
        whole = FlatBinding(model.parameters(), on_any_device=True)
        self.whole: torch.Tensor | None = whole.zeros()
        whole.read(self.whole)
        self.whole_elements = whole.num_elements
        self.cut = CutModel(model, self.plan, worker_id, seed)
        self.binding = FlatBinding(self.cut.parameters, on_any_device=True, num_cut=self.cut.num_cut)
        self.traffic = Traffic()

    def begin(
        self, ports: Ports[Any], within: Collectives | None, across: Collectives | None, *, carrier_counts: bool
    ) -> Ports[Any]:
        """Meets the others; returns the program's ports, with the shards.

        Args:
            ports: as they would be without a layout.
            within: collectives of the worker's group; None: it is alone in it.
            across: of the workers with the same shards; None: there are no others.
            carrier_counts: whether the carrier counts messages and bytes by itself.
        """
        self.whole = None
        counts = None if carrier_counts else ports.counts
        parts = self.plan.parts
        groups = self._num_workers // parts

        def counted(inner: Collectives | None, axis: str, size: int) -> Counted | None:
            return Counted(inner, axis, size, self.traffic, counts) if inner is not None else None

        everybody = counted(ports.collectives, "all", self._num_workers)
        replicas = counted(across, "replicas", groups)
        group = Axis(counted(within, "group", parts), self._worker_id % parts, parts, self.binding.num_elements)
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
        )
        shards = Shards(self.binding.cut_from, replicas) if self.cut.num_cut else None
        return replace(ports, collectives=everybody, shards=shards)


def check_layout(layout: Hybrid, algorithm: Algorithm) -> None:
    """Refuses an algorithm that does not know what to do with shards.

    Raises:
        UsageError: with the remedy.
    """
    if not algorithm.takes_shards:
        raise UsageError(
            f"{registry.spec(algorithm)} cannot average shards: {layout_registry.spec(layout)} goes with all-reduce"
            " without sharded, shares or codec."
        )


def check_optimizer_of(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that looks at more than one element at a time, of which a worker has only some.

    Raises:
        UsageError: with the remedy.
    """
    check_elementwise(
        optimizer,
        "Under a layout a worker has a part of each cut layer only, and {optimizer} may keep state or make decisions of whole"
        " ones",
    )
    if optimizer.state:
        raise UsageError(
            "Under a layout the optimizer begins without state, since that of whole layers would have to be cut: attach before"
            " the first step, or resume the run by its checkpoint."
        )
