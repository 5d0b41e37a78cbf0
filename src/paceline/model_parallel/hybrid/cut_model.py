"""A model of which this worker holds a part: its parameters, its layers' computation, and restoring the whole model."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.counters import dropout_part
from paceline.model_parallel.hybrid.borders import (
    gather_features,
    gather_rows,
    part_linear,
    scatter_rows,
    swap_to_rows,
)
from paceline.model_parallel.hybrid.mesh import Mesh
from paceline.model_parallel.hybrid.plan import CutLayer, CutPlan
from paceline.model_parallel.hybrid.rows import Rows
from paceline.optim.flat import FlatBinding
from paceline.optim.sharding import AxisShape, Shard, Sharding

__all__ = ["CutModel"]


class CutModel:
    """Replaces a model's cut layers by one worker's shards, in place: modules and parameters stay the same objects.

    Attributes:
        parameters: trainable ones: first those that every worker holds completely, then the shards.
        num_cut: number of shards among them.
        sharding: how their flat vectors relate to the whole model's.
        mesh: the workers; set by `connect`.
    """

    def __init__(self, model: nn.Module, plan: CutPlan, worker_id: int, seed: int = 0) -> None:
        self.model, self.plan = model, plan
        self.mesh = Mesh.alone()
        self._seed = seed
        self._version: Callable[[], int] = int
        self._repeats: Callable[[], bool] = bool
        self._pass = (-1, 0)  # the version at the last forward pass, and the number of passes at that version
        self._rows: Rows | None = None
        self._undo: list[Callable[[], None]] = []
        whole = FlatBinding(model.parameters(), on_any_device=True)
        self._dims = self._cut_dims()
        part = worker_id % plan.parts
        for parameter, dim in self._dims.items():
            parameter.data = parameter.data.chunk(plan.parts, dim)[part].clone(memory_format=torch.contiguous_format)
            parameter.grad = None
        self._in_order = whole.parameters
        alike = [one for one in whole.parameters if one not in self._dims]
        self.parameters = alike + [one for one in whole.parameters if one in self._dims]
        self.num_cut = len(self._dims)
        self.sharding = _sharding(whole, FlatBinding(self.parameters, on_any_device=True, num_cut=self.num_cut), self)
        self._hook()

    def __deepcopy__(self, memo: dict[int, Any]) -> CutModel:
        """A copy of the model, such as a moving average, has the same shards, on the same worker."""
        return self

    @property
    def parts(self) -> int:
        """The number of workers that share a model."""
        return self.plan.parts

    def samples_of_group(self, own: int) -> float:
        """The number of samples of its group if this worker has `own`, from the rows of the last pass."""
        rows = self._rows
        return 0 if rows is None else own * rows.total / rows.own if own else rows.total

    def dim_of(self, parameter: nn.Parameter) -> int | None:
        """The dimension along which it is cut; None: it is not cut."""
        return self._dims.get(parameter)

    def connect(self, mesh: Mesh, version: Callable[[], int] = int, repeats: Callable[[], bool] = bool) -> None:
        """Connects to the other workers.

        Args:
            mesh: the workers.
            version: returns the number of updates of the parameters, which determines dropout masks.
            repeats: tells whether the current batch is a repeated one, without weight.
        """
        self.mesh, self._version, self._repeats = mesh, version, repeats

    def empty_pass(self, like: Tensor) -> None:
        """Takes part in the others' pass without a batch; `like`: inputs of the same kind (n, ...)."""
        with torch.enable_grad():
            self.model(like[:0]).sum().backward()

    def make_whole(self) -> None:
        """Gathers the full cut parameters from the group's workers, which all call it at the same time."""
        for parameter, dim in self._dims.items():
            whole = torch.cat(self.mesh.group.all_gather(parameter.data).unbind(), dim)
            parameter.grad = None
            parameter.data = whole

    def take_whole(self, x: Tensor) -> None:
        """Sets the full cut parameters from the whole model's vector (W,)."""
        at = dict(zip(self._in_order, self.sharding.shards, strict=True))
        for parameter in self._dims:
            shard = at[parameter]
            numel = torch.Size(shard.shape).numel()
            parameter.grad = None
            parameter.data = x[shard.whole_at : shard.whole_at + numel].view(shard.shape).clone()

    def make_state_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """Gathers the optimizer's full state of the cut parameters, if it has their shapes."""
        for parameter, dim in self._dims.items():
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = torch.cat(self.mesh.group.all_gather(value).unbind(), dim)

    def norm(self, gradients: list[Tensor | None]) -> float:
        """The norm of the whole model's gradients, each parameter counted once; takes those of `parameters`, in order."""
        squares = torch.zeros(2, dtype=torch.float64)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                squares[int(parameter in self._dims)] += gradient.detach().double().square().sum().cpu()
        of_shards = self.mesh.group.all_gather(squares[1:]).sum()
        return float((squares[0] + of_shards).sqrt())

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    # The computation of its modules

    def _cut_dims(self) -> dict[nn.Parameter, int]:
        modules, dims = dict(self.model.named_modules()), {}
        for layer in self.plan.layers:
            module: Any = modules[layer.name]
            dims[module.weight] = layer.dim
            if module.bias is not None and layer.dim == 0:
                dims[module.bias] = 0
        return dims

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
            raise UsageError("A model under a layout is called with a tensor whose first dimension is the samples'.")
        version = self._version()
        self._pass = (version, self._pass[1] + 1 if self._pass[0] == version else 0)
        rows = -len(first) if self._repeats() else len(first)
        self._rows = Rows(self.mesh, self.mesh.count_rows(rows), self._pass)

    def _of_pass(self, name: str) -> Rows:
        if self._rows is None:
            raise UsageError(
                f"{name} is cut over the workers of a group, which compute it together, so that one cannot evaluate the model"
                " by itself: give attach its evaluate=, or evaluate after the `with`; and call the model as a whole."
            )
        return self._rows

    def _linear(self, layer: CutLayer, module: nn.Module, x: Tensor) -> Tensor:
        rows, axis = self._of_pass(layer.name), self.mesh.group
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        if x.dim() != 2 or (layer.entry == "rows" and len(x) != rows.own):
            raise UsageError(
                f"{layer.name} is cut, and takes one row of inputs for each sample, not {tuple(x.shape)}: leave it out"
                " of layers=."
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
            first[:2] = rows.first_of_group, self.mesh.group.index * x.shape[1]
            whole[1] *= self.mesh.group.size
        return dropout_part(x, seed, whole, first, module.p)


def _sharding(whole: FlatBinding, own: FlatBinding, cut: CutModel) -> Sharding:
    at = dict(zip(own.parameters, own.offsets, strict=True))
    shards, group = [], AxisShape(cut.parts)
    for parameter, whole_at in zip(whole.parameters, whole.offsets, strict=True):
        dim, shape = cut.dim_of(parameter), list(parameter.shape)
        if dim is not None:
            shape[dim] *= cut.parts
        cuts = () if dim is None else ((dim, group),)
        shards.append(Shard(whole_at, at[parameter], tuple(shape), cuts))
    numbers = whole.num_elements, own.num_elements, own.cut_from
    return Sharding(cut.parts, *numbers, tuple(shards), {"group": group})
