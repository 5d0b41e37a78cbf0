"""Warn if a loop changes its gradients between backward and step, as clipping does, before they are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from paceline.errors import ClippingWarning

__all__ = ["watch_gradients"]

_WATCHED_STEPS = 64  # afterwards the loop is assumed not to change its behaviour
_WARNING = (
    "This loop changes its gradients between backward and step, as clipping does. With this algorithm that acts on each"
    " worker's own gradient, before their mean is taken, and not on the mean, as one worker with a larger batch would have it:"
    " use all-reduce, whose gradients are the mean when backward returns."
)


def watch_gradients(
    parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Callable[[torch.optim.Optimizer], None], Callable[[], None]]:
    """Warns once if a loop changes gradients between the end of backward and the optimizer's step.

    A change shows in PyTorch's count of in-place changes, or in a gradient's address. Later backward passes, GradScaler's
    unscaling, and gradients set to zero do not count. Optimizer hooks registered later run later, and are not checked.

    Costs: about a microsecond per parameter and backward pass in the first 64 steps, nothing afterwards.

    Args:
        parameters: that the loop trains.
        optimizers: the loop's; a step of one gives the warning.

    Returns:
        a function to call with the optimizer when a closure has computed a gradient; and an undo function.
    """
    # By parameter: where its gradient lay when backward ended, and PyTorch's count of changes.
    backward_left: dict[int, tuple[int, int]] = {}
    num_steps = 0

    def note(index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided:
            backward_left[index] = gradient.data_ptr(), gradient._version

    def look(stepping: torch.optim.Optimizer, args: Sequence[Any] = (), kwargs: Any = None) -> None:
        nonlocal num_steps
        if len(args) > 1 or kwargs:  # the gradient comes from a closure
            return
        num_steps += 1
        scaled = _counted_by_scaler(parameters[0].device) if hasattr(stepping, "found_inf") else 0
        for index, (address, version) in backward_left.items():
            gradient = parameters[index].grad
            if gradient is None or (gradient.data_ptr(), gradient._version) == (address, version + scaled):
                continue
            if bool(gradient.any()):
                warnings.warn(_WARNING, ClippingWarning, stacklevel=3)
                num_steps = _WATCHED_STEPS
                break
        backward_left.clear()
        if num_steps >= _WATCHED_STEPS:
            stop_noting()

    def stop_noting() -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()

    def undo() -> None:
        stop_noting()
        for hook in looking:
            hook.remove()

    hooks = [one.register_post_accumulate_grad_hook(partial(note, index)) for index, one in enumerate(parameters)]
    looking = [one.register_step_pre_hook(look) for one in optimizers]
    return look, undo


@cache
def _counted_by_scaler(device: torch.device) -> int:
    """How many changes PyTorch counts when GradScaler unscales a gradient or checks it for infinities."""
    parameter, scaler = nn.Parameter(torch.ones(1, device=device)), torch.amp.GradScaler(device.type)
    parameter.grad = torch.ones(1, device=device)
    scaler.scale(torch.ones(1, device=device))  # makes its scale
    scaler.unscale_(torch.optim.SGD([parameter]))
    return parameter.grad._version
