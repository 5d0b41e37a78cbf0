"""Warn if a loop changes its gradients between backward and step, as clipping does, before they are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from paceline.errors import ClippingWarning
from paceline.loop.guards.guard import Guard
from paceline.loop.guards.noted_gradients import NotedGradients

_WATCHED_STEPS = 64  # afterwards the loop is assumed not to change its behaviour
_WARNING = (
    "This loop changes its gradients between backward and step, as clipping does. {Here} that acts on each worker's own"
    " gradient, before their mean is taken, and not on the mean, as one worker with a larger batch would have it{remedy}."
)
_IN_TURN = _WARNING.format(Here="With optimizers that step in turn, whose gradients are averaged in step,", remedy="")
_TOGETHER = _WARNING.format(
    Here="With this algorithm", remedy=": use all-reduce, whose gradients are the mean when backward returns"
)


class GradientWatch(Guard):
    """Warns once if a loop changes gradients between the end of backward and the optimizer's step.

    A change shows in PyTorch's count of in-place changes, or in a gradient's address. Later backward passes, GradScaler's
    unscaling, and gradients set to zero do not count. Optimizer hooks registered later run later, and are not checked.

    Costs: about a microsecond per parameter and backward pass in the first 64 steps, nothing afterwards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, in_turn: bool = False) -> None:
        self._warning = _IN_TURN if in_turn else _TOGETHER
        self._noted = NotedGradients(parameters)
        self._device = parameters[0].device
        self._num_steps = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps += 1
        scaled = _counted_by_scaler(self._device) if hasattr(optimizer, "found_inf") else 0
        for gradient, is_another, num_changes in self._noted.take():
            if (is_another or num_changes != scaled) and bool(gradient.any()):
                warnings.warn(self._warning, ClippingWarning, stacklevel=5)
                self._num_steps = _WATCHED_STEPS
                break
        if self._num_steps >= _WATCHED_STEPS:
            self.close()

    def close(self) -> None:
        self._noted.remove()


@cache
def _counted_by_scaler(device: torch.device) -> int:
    """How many changes PyTorch counts when GradScaler unscales a gradient or checks it for infinities."""
    parameter, scaler = nn.Parameter(torch.ones(1, device=device)), torch.amp.GradScaler(device.type)
    parameter.grad = torch.ones(1, device=device)
    scaler.scale(torch.ones(1, device=device))  # makes its scale
    scaler.unscale_(torch.optim.SGD([parameter]))
    return parameter.grad._version
