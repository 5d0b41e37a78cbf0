"""The user's own loop as a simulated worker: gradients are the loop's, only their time is virtual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.attached_replica import AttachedReplica
from paceline.simulator.core import Core
from paceline.transport.base import Piece

__all__ = ["SimulatedAttachedReplica"]


class SimulatedAttachedReplica(AttachedReplica):
    """An `AttachedReplica` whose forward, backward, copies and updates take the cluster's time.

    Args:
        optimizer: the user's.
        core: times. The first batch is what `Cluster.compute_s` is about; others take their share.
        base: as for `AttachedReplica`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, core: Core, **base: Any) -> None:
        super().__init__(optimizer, **base)
        self._core = core

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Copies `x` (P,) into this worker's private vector."""
        self._core.copy()
        return super().copy(x)

    def gradient(
        self,
        at: torch.Tensor,
        version: int,
        ready: Callable[[torch.Tensor], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Lets the loop compute at `at` (P,); the gradient is ready, and handed out, when its time has passed.

        What the loop does with its gradients before `step`, such as to clip them, it does with its own.
        """
        super().gradient(at, version)
        if not self._absent:
            self._core.compute(self.samples)
            self._gradient_ended_s = self._now_s()
        if ready is not None:
            ready(self.g)
        if finish is not None:
            finish()
            self.binding.bind_gradients(self.g, self.missing)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None) -> None:
        """Lets the optimizer take its one step on `to` (P,), at the end of the update's time."""
        begun_s = self._now_s()
        self._core.update()
        self._apply_s += self._now_s() - begun_s
        super().apply(to, scale, of)

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on `to` (S,), at the end of its time."""
        begun_s = self._now_s()
        self._core.update(self._core.cluster.workers)
        self._apply_s += self._now_s() - begun_s
        super().apply_pieces(to, g, pieces)

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        self._apply_s += self._core.moved_s
        self._core.moved_s = 0.0
        super()._record(applied_version, gradient_version, failed_publishes)
