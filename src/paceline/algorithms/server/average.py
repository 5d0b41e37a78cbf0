"""Exponential moving average of parameters, for evaluation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["MovingAverage"]


class MovingAverage:
    """average <- decay average + (1 - decay) x after every update, beginning with the x it is made from.

    Evaluated instead of the parameters it has less of the noise that many workers bring. BatchNorm's statistics need one of
    their own, with the same decay: an averaged model with the newest statistics is no model that ever was.

    Args:
        x: first value (P,), copied.
        decay: share of the old average that is kept.
        warm_up: keeps at most (1 + n) / (10 + n) at the n-th update, so that short runs do not evaluate where they began.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981. The warm-up is TensorFlow's.
    """

    def __init__(self, x: Tensor, decay: float = 0.9999, *, warm_up: bool = True) -> None:
        if not (0 <= decay < 1 and math.isfinite(decay)):
            raise ValueError(f"decay is from 0 up to, but not including, 1, not {decay}")
        self.x = x.detach().clone()
        self._decay, self._warm_up = decay, warm_up
        self._updates = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """Count the parameters (P,) after an update."""
        n = int(self._updates.add_(1))
        decay = min(self._decay, (1 + n) / (10 + n)) if self._warm_up else self._decay
        self.x.lerp_(x.detach(), 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """The live tensors of a snapshot."""
        return {"average": self.x, "average_updates": self._updates}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a snapshot's tensors, by copy."""
        for name, own in self.state().items():
            own.copy_(state[name])
