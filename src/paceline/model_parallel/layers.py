"""A model's convolutions and fully connected layers, in the form that the balance equations take."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.planner.balance import Layer
from paceline.tasks.base import evaluation_mode

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_GROUPS_PLACE = 6  # index of `groups` in a convolution's arguments


def model_layers(model: nn.Module, inputs: Tensor) -> list[Layer]:
    """Each layer, at each use in the order of the forward pass, with the sizes of its images.

    A convolution with g groups has 1/g of the inputs per output. A linear layer over a sequence has one output per position
    of the sequence. Calls of `torch.nn.functional` count, so modules that call it directly are included. A matrix product
    written as `x @ w` is not included, and neither is PyTorch's attention, which is one operation.

    Args:
        model: runs once, without gradients, in evaluation mode; its mode is restored.
        inputs: (points, ...) a batch of any size.
    """
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    seen, fast = _Seen(len(inputs), names), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it fuses a whole encoder layer into one operation
    try:
        with evaluation_mode(model), seen:
            model(inputs.clone())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return seen.layers


class _Seen(TorchFunctionMode):
    def __init__(self, points: int, names: dict[int, str]) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self._points, self._names = points, names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.linear or func in _CONVOLUTIONS:
            x, weight = (
                kwargs.get(name, args[at] if len(args) > at else None) for at, name in enumerate(("input", "weight"))
            )
            name = self._names.get(id(weight), f"layer {len(self.layers) + 1}")
            if func is F.linear:
                per_point = math.prod(output.shape[:-1]) // self._points
                sizes = {"ifm": weight.shape[1], "ofm": weight.shape[0], "in_size": per_point, "out_size": per_point}
            else:
                groups = args[_GROUPS_PLACE] if len(args) > _GROUPS_PLACE else kwargs.get("groups", 1)
                sizes = {"ifm": weight.shape[1], "ofm": weight.shape[0], "kernel": math.prod(weight.shape[2:])}
                sizes |= {"in_size": x[0, 0].numel() * groups, "out_size": output[0, 0].numel()}
            self.layers.append(Layer(name=name, **sizes))
        return output
