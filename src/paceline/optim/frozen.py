"""A model's frozen parameters in checkpoints, and for dead workers' replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.optim.model_state import digest, state_of
from paceline.system.saved_state import fits

_GLANCED = 64  # elements of a parameter


class FrozenParameters:
    """Frozen parameters for a worker's part of checkpoints: values of those that the loop changes, digests of the others.

    Frozen weights may be many times larger than trained ones, and each start of the script makes or loads them again. What a
    loop changes, such as a moving average of the trained ones, is nowhere else.

    Costs per checkpoint: a look at 64 elements of each parameter, and a digest of it at the first one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name: one
            for name, one in state_of(model).items()
            if type(one) is nn.Parameter and not one.requires_grad and one.layout is torch.strided
        }
        self._began: dict[str, bytes] = {}
        self._digests: dict[str, list[int]] = {}

    def begin(self, saved: Mapping[str, Any]) -> list[str]:
        """The loop begins, with what `state` of an earlier part returned; returns which of the others differ from those."""
        differ = []
        for name, one in self._parameters.items():
            self._began[name], before = _glance(one), saved.get(name)
            if isinstance(before, list) and before != self._digest(name, one):
                differ.append(name)
            elif isinstance(before, torch.Tensor) and fits(before, one.detach()):
                one.data.copy_(before)
        return differ

    def changed(self) -> dict[str, torch.Tensor]:
        """By parameter that the loop has changed, a copy of its values."""
        return {
            name: one.detach().to("cpu", copy=True)
            for name, one in self._parameters.items()
            if _glance(one) != self._began.get(name)
        }

    def state(self) -> dict[str, Any]:
        """`changed`, and digests of the others."""
        changed = self.changed()
        digests = {name: self._digest(name, one) for name, one in self._parameters.items() if name not in changed}
        return {**changed, **digests}

    def _digest(self, name: str, parameter: nn.Parameter) -> list[int]:
        if name not in self._digests:
            self._digests[name] = list(digest(parameter))
        return self._digests[name]


def _glance(parameter: nn.Parameter) -> bytes:
    elements = parameter.detach().resolve_conj().resolve_neg().flatten()
    some = elements[:: max(1, len(elements) // _GLANCED)].contiguous()
    return some.view(torch.uint8).cpu().numpy().tobytes()
