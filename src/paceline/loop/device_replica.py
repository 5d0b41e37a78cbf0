"""A replica whose model is on a GPU, while the workers' parameters are in the host's memory."""

from __future__ import annotations

from typing import Any

import torch

from paceline.loop.replica import AttachedReplica
from paceline.ports.replica import OnBucket, OnEnd


class DeviceReplica(AttachedReplica):
    """Computes gradients and steps on a copy in the GPU's memory, and writes the update to the vector that workers share.

    Costs per step: the parameters are copied to the GPU twice and back once, for which the worker waits; three vectors on the
    GPU. Where a lock excludes others, it is held for the second copy, the optimizer's step and the copy back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **base: Any) -> None:
        super().__init__(optimizer, **base)
        self._own = self._private = self.binding.zeros()

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        super().gradient(at if at is self._own else self.copy(at), version, ready, finish)

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits until the GPU has computed the gradient, so that no other worker waits for that at a lock."""
        self._own[:1].cpu()
        super().prepare_step(optimizer)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        """As in `ProgramSide`; without `of`, adds the step's change to `to`, so that others' updates meanwhile stay."""
        own = self._own
        own.copy_(to if of is None else of)
        before = own.clone() if of is None else own
        super().apply(own, scale, weight=weight)
        if of is None:
            to.add_(torch.sub(own, before, out=before).cpu())
        else:
            to.copy_(own)

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), in the host's memory."""
        return after - before
