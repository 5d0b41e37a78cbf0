"""`torch.amp.GradScaler` under `attach`: it calls `step` even if it has found an infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from paceline.system.torch_internals import SCALES_IN_STEP


def ask_for_every_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Makes GradScaler always call `step`, with `grad_scale` and `found_inf` on the optimizer; returns an undo function.

    Otherwise GradScaler skips the call if a gradient overflowed, and workers in lockstep would wait for this one.
    """
    had = optimizer.__dict__.get(SCALES_IN_STEP)
    setattr(optimizer, SCALES_IN_STEP, True)

    def undo() -> None:
        if had is None:
            delattr(optimizer, SCALES_IN_STEP)
        else:
            setattr(optimizer, SCALES_IN_STEP, had)

    return undo


def take_over_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Unscales the gradients if the loop has not, as GradScaler would have; returns whether one overflowed.

    Paceline then decides whether to make the step, even for a fused optimizer.
    """
    scale, found = optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    overflowed = bool(found.item()) if isinstance(found, torch.Tensor) else bool(found)
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = None  # type: ignore[attr-defined]
    return overflowed


class HiddenGradients:
    """Hides gradients from the optimizer during a step that must change nothing."""

    def __init__(self) -> None:
        self._kept: dict[torch.Tensor, torch.Tensor | None] = {}

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        self._kept = {p: p.grad for p in parameters}
        for parameter in self._kept:
            parameter.grad = None

    def show(self, of: Iterable[torch.Tensor] | None) -> bool:
        """Restores all gradients, or those `of` an optimizer that steps before others; returns whether any were hidden."""
        for parameter in self._kept if of is None else self._kept.keys() & set(of):
            parameter.grad = self._kept[parameter]
        return bool(self._kept)

    def forget(self) -> None:
        self._kept = {}
