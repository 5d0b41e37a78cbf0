"""Detect whether a loop changes its gradients between backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["NotedGradients"]


class NotedGradients:
    """Notes each parameter's gradient after backward: its address, and PyTorch's count of in-place changes.

    Args:
        parameters: whose gradients are noted.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._noted: dict[torch.Tensor, tuple[int, int]] = {}
        self._hooks: list[Any] = [one.register_post_accumulate_grad_hook(self.note) for one in parameters]

    def note(self, parameter: torch.Tensor) -> None:
        """Takes a parameter's present gradient as unchanged."""
        if parameter.grad is not None:
            self._noted[parameter] = parameter.grad.data_ptr(), parameter.grad._version

    def have_changed(self) -> bool:
        """Whether one has been changed in place since it was noted; call it once per step."""
        noted, self._noted = self._noted, {}
        return any(
            one.grad is not None and one.grad.data_ptr() == address and one.grad._version != version
            for one, (address, version) in noted.items()
        )

    def remove(self) -> None:
        """Notes no more."""
        while self._hooks:
            self._hooks.pop().remove()
