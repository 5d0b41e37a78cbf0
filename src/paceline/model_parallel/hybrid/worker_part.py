"""A worker's part of a model with cut layers: their computation, and the worker's place among the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.model_parallel.axes import Axis
from paceline.model_parallel.counters import dropout_part
from paceline.model_parallel.hybrid.borders import (
    Rows,
    gather_features,
    gather_rows,
    part_linear,
    scatter_rows,
    swap_to_rows,
)
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.plan import CutLayer, plan_cuts
from paceline.model_parallel.placement import Placement, clip_to_norm
from paceline.model_parallel.sharded_part import ShardedPart
from paceline.optim.settings import check_elementwise
from paceline.optim.sharding import REPLICAS, AxisShape
from paceline.ports.ports import Ports, Shards
from paceline.ports.rooted import RootedCollectives


class WorkerPart(ShardedPart):
    """Implements `LayoutPart`: cut layers compute with this worker's shards."""

    pending = None

    def __init__(self, layout: HybridParallel, model: nn.Module, worker_id: int, num_workers: int, seed: int) -> None:
        self.plan = plan_cuts(model, layout, num_workers)  # how it is cut
        parts = self.plan.parts
        axes = {"group": AxisShape(parts), REPLICAS: AxisShape(num_workers // parts, parts)}
        super().__init__(model, axes, worker_id)
        self.dealt = worker_id, num_workers  # as of `LayoutPart`
        self.without_batch = self._empty_pass  # takes part in the others' passes, in a round without a batch
        self._seed = seed
        self._everybody = Axis()
        self._version: Callable[[], int] = int
        self._pass = (-1, 0)  # the version at the last forward pass, and the number of passes at that version
        self._rows: Rows | None = None
        self._undo: list[Callable[[], None]] = []
        self._divide(self._placements(), cut_last=True)
        self._hook()

    def __deepcopy__(self, memo: dict[int, Any]) -> WorkerPart:
        """A copy of the model, such as a moving average, has the same shards, on the same worker."""
        return self

    def begin(self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm) -> Ports[Any]:
        self._connect(axes)
        num_workers = self.dealt[1]
        everybody: Any = ports.collectives if num_workers > 1 else None
        self._everybody = Axis(everybody, num_workers, self.worker_id)
        self._version = lambda: ports.shared.version
        if self.sharding is None:
            return ports
        return replace(ports, shards=Shards(self.binding.cut_from, axes.get(REPLICAS), self._samples_of_group))

    def clip(self, max_norm: float) -> float:
        """Clips the gradients to a norm of at most `max_norm`; returns the norm before. All workers call it."""
        placed = [(one, self._placed.get(one, Placement())) for one in self.binding.parameters]
        return float(clip_to_norm(placed, self.along, self.along["group"], max_norm))

    def has_changed_gradients(self) -> bool:
        """Whether gradients have changed in a way that the replica's own check does not see."""
        return False

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _samples_of_group(self, own: int) -> float:
        """The number of samples of its group if this worker has `own`, from the rows of the last pass."""
        rows = self._rows
        return 0 if rows is None else own * rows.total / rows.own if own else rows.total

    def _empty_pass(self, like: Tensor) -> None:
        """`like`: inputs of the same kind (n, ...)."""
        with torch.enable_grad():
            self.model(like[:0]).sum().backward()

    # The computation of its modules

    def _placements(self) -> dict[nn.Parameter, Placement]:
        modules, found = dict(self.model.named_modules()), {}
        for layer in self.plan.layers:
            module: Any = modules[layer.name]
            found[module.weight] = Placement(((layer.dim, "group"),))
            if module.bias is not None and layer.dim == 0:
                found[module.bias] = Placement(((0, "group"),))
        return found

    def _hook(self) -> None:
        modules = dict(self.model.named_modules())
        for layer in self.plan.layers:
            self._replace_forward(modules[layer.name], partial(self._linear, layer, modules[layer.name]))
        for name, module in modules.items():
            if isinstance(module, nn.Dropout):
                self._replace_forward(module, partial(self._dropout, name, module))
        hook = self.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True, prepend=True)
        self._undo.append(hook.remove)

    def _replace_forward(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        module.forward = forward  # of this object only: it computes with this worker's shards
        self._undo.append(lambda: module.__dict__.pop("forward", None))

    def _begin_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._rows = None
            return
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()), None)
        if first is None:
            raise UsageError("Call a model under a layout with a tensor whose first dimension is the samples.")
        version = self._version()
        self._pass = (version, self._pass[1] + 1 if self._pass[0] == version else 0)
        own = torch.tensor(-len(first) if self.repeats() else len(first), dtype=torch.float64)
        counts = [int(one) for one in self._everybody.all_gather(own).tolist()]
        self._rows = Rows(counts, self.worker_id, self.plan.parts, self._pass)

    def _of_pass(self, name: str) -> Rows:
        if self._rows is None:
            raise UsageError(
                f"{name} is cut over the workers of a group, which compute it together, so one worker alone cannot "
                "evaluate the model: give attach its evaluate=, or evaluate after the `with`; and call the model as a "
                "whole."
            )
        return self._rows

    def _linear(self, layer: CutLayer, module: nn.Module, x: Tensor) -> Tensor:
        rows, axis = self._of_pass(layer.name), self.along["group"]
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        if x.dim() != 2 or (layer.entry == "rows" and len(x) != rows.own):
            raise UsageError(
                f"{layer.name} is cut and takes one row of inputs for each sample, not {tuple(x.shape)}: leave it out "
                "of layers=."
            )
        if layer.entry == "rows":
            x = gather_rows(x, axis, rows)
        elif layer.entry == "features":
            x = gather_features(x, axis)
        y = part_linear(x, weight, bias if layer.dim == 0 else None, rows)
        if layer.exit == "rows":
            return swap_to_rows(y, axis, rows)
        if layer.exit == "sum":
            y = scatter_rows(y, axis, rows)
            return y if bias is None else y + bias  # added once, not by every part
        return y

    def _dropout(self, name: str, module: nn.Dropout, x: Tensor) -> Tensor:
        if not module.training or not module.p:
            return x
        rows = self._of_pass(name)
        seed = (zlib.crc32(name.encode()), self._seed, *rows.number)
        first, whole = [rows.first, *[0] * (x.dim() - 1)], list(x.shape)  # places do not depend on the number of rows
        if name in self.plan.dropouts:
            first[:2] = rows.first_of_group, self.along["group"].index * x.shape[1]
            whole[1] *= self.plan.parts
        return dropout_part(x, seed, whole, first, module.p)


def check_algorithm(algorithm: Algorithm) -> None:
    """Rejects an algorithm that does not support shards."""
    if not algorithm.takes_shards:
        raise UsageError(
            f"{registry.spec(algorithm)} cannot average shards: use all-reduce without sharded, shares or codec."
        )


def check_optimizer_of(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer that combines elements of a parameter: a worker has only some of them."""
    check_elementwise(
        optimizer,
        "Under a layout a worker has a part of each cut layer only, and {optimizer} may keep state or make decisions of whole"
        " ones",
        but={"Adagrad"},
    )
    if isinstance(optimizer, torch.optim.Adagrad):
        raise UsageError(
            "Under a layout the optimizer must start without state, but Adagrad has state as soon as it is made: "
            "choose another, such as RMSprop or Adam."
        )
    if optimizer.state:
        raise UsageError(
            "Under a layout the optimizer must start without state, since the state of whole layers would have to be "
            "cut: attach before the first step, or resume the run from its checkpoint."
        )
