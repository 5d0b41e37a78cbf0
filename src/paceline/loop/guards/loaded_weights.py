"""Changes that a loop makes to a model: replaced tensors, and loaded values that others may soon overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.loop.guards.guard import Guard
from paceline.loop.guards.hidden_hooks import HiddenHook, hookable
from paceline.membership.final_mean import LeftWeights
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers


class Places(Guard):
    """The places of trained parameters and buffers in a model, where a loop may put other tensors.

    `load_state_dict(assign=True)` does so, and for buffers `self.mean = 0.9 * self.mean + x`. After every step the original
    buffer gets the new value and its place back, because shared memory, checkpoints and evaluations refer to it.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        trained = set(parameters)
        self._places = [
            (module._parameters, name, parameter)
            for module in hookable(model)
            for name, parameter in module._parameters.items()
            if parameter in trained
        ]
        known = {id(one): one for one in dense_buffers(model).values()}
        self._buffers = [
            (module._buffers, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in known
        ]
        self.buffers = list(known.values())  # the original ones

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.put_back()

    def close(self) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Puts the original buffers back in place of new ones, with the new ones' values."""
        for own, name, buffer in self._buffers:
            other = own.get(name)
            if other is not buffer and other is not None and _is_like(other, buffer):
                with torch.no_grad():
                    buffer.copy_(other.clone())  # it may be a view of the buffer
                own[name] = buffer

    def others(self) -> dict[torch.Tensor, torch.Tensor]:
        """The replaced parameters, each with its replacement."""
        found = ((parameter, own.get(name)) for own, name, parameter in self._places)
        return {one: other for one, other in found if one is not None and other is not None and other is not one}

    def write_back(self) -> None:
        for parameter, other in self.others().items():
            other.data.copy_(parameter.data)


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)


class Loads(Guard):
    """Values that `load_state_dict` has put into a model's parameters and buffers since the last step.

    Keeps copies, as other workers may overwrite the same memory right after a load.
    """

    def __init__(self, model: nn.Module) -> None:
        self.were_any = False  # whether anything was loaded since the beginning
        self.before: Callable[[], None] | None = None  # called before each module loads
        self._loaded: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        hook = HiddenHook(self._on_load)
        self._handles = [module.register_load_state_dict_pre_hook(hook) for module in hookable(model)]

    @property
    def any(self) -> bool:
        return bool(self._loaded)

    def forget(self) -> None:
        self._loaded.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.before = None
        self.forget()

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value loaded into a tensor, or its present one."""
        count, value = self._loaded.get(tensor, (-1, tensor))
        return value if tensor._version == count else tensor.detach()

    def _on_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.before is not None:
            self.before()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            value = state.get(prefix + name)
            if tensor is not None and isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                self.were_any = True
                self._loaded[tensor] = tensor._version + 1, value.detach().to(tensor, copy=True)


def left_weights(binding: FlatBinding, places: Places, loads: Loads, *, has_changed: bool) -> LeftWeights | None:
    """The weights that a loop has put into its model after its last step, or `has_changed` otherwise; None: none."""
    others = places.others()
    if not (has_changed or others or loads.any):
        return None
    x = binding.zeros()
    for parameter, view in zip(binding.parameters, binding.views(x), strict=True):
        now: torch.Tensor = others.get(parameter, parameter)  # pyright: ignore[reportAssignmentType]
        view.copy_(loads.value_of(now))
    places.put_back()
    return LeftWeights(x, [loads.value_of(buffer).clone() for buffer in places.buffers])
