"""Converts a sharded model and its optimizer to whole tensors, which any other mesh can load; clips gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.placement import Placement, clip_to_norm
from paceline.model_parallel.tensor.layers import cut_modules
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.optim.settings import check_elementwise


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Rejects models that a mesh would train wrongly.

    Raises:
        UsageError: a parameter is not in one of our layers, has two placements or a half-precision type, or the optimizer's
            update of an element depends on others.
    """
    placements_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype.itemsize < torch.float32.itemsize:
            raise UsageError(
                f"{name} is {parameter.dtype}, in which sums over workers lose most digits: keep it in float32."
            )
    if optimizer is not None:
        check_elementwise(optimizer, "{optimizer} may look at more of a matrix than the part that a worker has")


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors by name, on every worker; all workers call it together.

    Costs: memory for the whole model on each worker.
    """
    mesh, placed = placements_of(model)
    state = model.state_dict()
    return {name: _placement(name, placed).gather(tensor, mesh.axes).clone() for name, tensor in state.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads each worker's parts from whole tensors, regardless of the mesh that saved them.

    Raises:
        UsageError: names or shapes do not match the model.
    """
    mesh, placed = placements_of(model)
    own = model.state_dict()
    if differing := sorted(own.keys() ^ state.keys()):
        raise UsageError(f"The saved state belongs to another model: only one of the two has {differing[0]}.")
    for name, tensor in own.items():
        tensor.copy_(_part(name, state[name], tensor.shape, mesh, placed))


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """DTensors on the parameters' own memory, for `torch.distributed.checkpoint`, so that no worker has the whole model.

    `dcp.load` into that of a model on another mesh fills its parameters. All workers call it together; it makes process
    groups. The optimizer's state is not in it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes half a second

    mesh, placed = placements_of(model)
    if mesh.shape.workers == 1:
        return dict(model.state_dict())
    names = tuple(name for name in mesh.axes if name != "world")
    device = next(model.parameters()).device.type
    devices = init_device_mesh(device, tuple(mesh.axes[name].size for name in names), mesh_dim_names=names)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        dimension = {axis: at for at, axis in _placement(name, placed).cuts}
        where = [Shard(dimension[axis]) if axis in dimension else Replicate() for axis in names]
        state[name] = DTensor.from_local(tensor, devices, where, run_check=False)
    return state


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with whole tensors and parameters' names, as `torch.distributed.checkpoint.state_dict` has it."""
    check_model(model, optimizer)
    mesh, placed = placements_of(model)
    names = _names(model)
    parameters = {names[id(one)]: one for group in optimizer.param_groups for one in group["params"]}
    state = {}
    for name, parameter in parameters.items():
        state[name] = {
            key: placed[name].gather(value, mesh.axes).clone() if _is_like(value, parameter) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
    groups = [{**group, "params": [names[id(one)] for one in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads each worker's parts; the optimizer must have the same groups as the saved one.

    Raises:
        UsageError: it has others.
    """
    check_model(model, optimizer)
    mesh, placed = placements_of(model)
    names = _names(model)
    groups = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in state["param_groups"]]:
        raise UsageError("The saved optimizer has different parameter groups: build this optimizer with the same ones.")
    number = {name: at for at, name in enumerate(name for group in groups for name in group)}
    parameters = dict(model.named_parameters())
    packed = {}
    for name, saved in state["state"].items():
        shape = parameters[name].shape
        packed[number[name]] = {
            key: _part(name, value, shape, mesh, placed).clone() if torch.is_tensor(value) and value.dim() else value
            for key, value in saved.items()
        }
    settings = [
        {**saved, "params": [number[name] for name in group]}
        for saved, group in zip(state["param_groups"], groups, strict=True)
    ]
    optimizer.load_state_dict({"state": packed, "param_groups": settings})


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Clips gradients to a norm of at most `max_norm`, like `torch.nn.utils.clip_grad_norm_` with the whole model.

    Each element counts once, regardless of how many workers have it; returns the norm before, which is the same on all. Costs
    an all-reduce of one number.
    """
    mesh, placed = placements_of(model)
    axes = {axis: one for axis, one in mesh.axes.items() if axis != "world"}
    parameters = [(one, placed[name]) for name, one in model.named_parameters()]
    return clip_to_norm(parameters, axes, mesh.axes["world"], max_norm)


def placements_of(model: nn.Module) -> tuple[Mesh, dict[str, Placement]]:
    """The model's mesh, and the placements of its parameters, by name."""
    mesh: Mesh | None = None
    placed: dict[int, Placement] = {}
    for prefix, module in cut_modules(model):
        mesh = module.mesh
        for name, placement in module.placements.items():
            parameter = getattr(module, name)
            if placed.setdefault(id(parameter), placement) != placement:
                raise UsageError(
                    f"{prefix}.{name} is shared with a layer that cuts it in another way: tie an output layer to an embedding"
                    " with `embedding.logits(x)`, or give each a parameter of its own."
                )
    if mesh is None:
        raise UsageError("The model has no layer on a mesh: build it from the layers of paceline.model_parallel.")
    for name, parameter in model.named_parameters():
        if id(parameter) not in placed:
            raise UsageError(
                f"{name} belongs to no layer of paceline.model_parallel, so each worker would have a different gradient: "
                "build the model from those layers."
            )
    return mesh, {name: placed[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}


def _names(model: nn.Module) -> dict[int, str]:
    return {id(one): name for name, one in model.named_parameters()}


def _placement(name: str, placed: Mapping[str, Placement]) -> Placement:
    return placed.get(name, Placement())  # buffers are the same on all workers


def _part(name: str, whole: Tensor, shape: torch.Size, mesh: Mesh, placed: Mapping[str, Placement]) -> Tensor:
    part = _placement(name, placed).cut(whole, mesh.axes)
    if part.shape != shape:
        raise UsageError(
            f"The saved {name} belongs to another model: a worker's part of its shape {tuple(whole.shape)} would be "
            f"{tuple(part.shape)}, but this model's is {tuple(shape)}."
        )
    return part


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
