"""Detect whether a loop changes its gradients between backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class NotedGradients:
    """Notes each parameter's gradient after backward: its address, and PyTorch's count of in-place changes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._noted: dict[torch.Tensor, tuple[int, int]] = {}
        self._hooks: list[Any] = [one.register_post_accumulate_grad_hook(self.note) for one in parameters]

    def note(self, parameter: torch.Tensor) -> None:
        """Takes a parameter's present gradient as unchanged; sparse ones are not noted."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided:
            self._noted[parameter] = gradient.data_ptr(), gradient._version

    def take(self) -> Iterator[tuple[torch.Tensor, bool, int]]:
        """Forgets the notes; yields each noted gradient as it is now, whether it is another tensor, and its changes since."""
        noted, self._noted = self._noted, {}
        for parameter, (address, version) in noted.items():
            if (gradient := parameter.grad) is not None:
                yield gradient, gradient.data_ptr() != address, gradient._version - version

    def have_changed(self) -> bool:
        """Whether one has been changed in place since it was noted; call it once per step."""
        return any(num_changes and not is_another for _, is_another, num_changes in self.take())

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
