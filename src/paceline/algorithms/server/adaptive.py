"""RMSProp and Adam on a shard, as torch.optim defines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.specs.bounds import DECAY, FROM_0

__all__ = ["Adam", "RMSProp"]


@dataclass(frozen=True, kw_only=True)
class RMSProp(ApplyRule):
    """v <- alpha v + (1 - alpha) g^2; x <- x - rate g / (sqrt(v) + eps). Costs: one vector of state, two with momentum.

    Args:
        alpha: share of the old mean square that is kept. (TensorFlow's distributed Inception: 0.9, momentum 0.9, eps 1.)
        eps: added to the root, outside it as in torch; TensorFlow adds it inside.
        momentum: beta of m <- beta m + g / (sqrt(v) + eps); x <- x - rate m.
    """

    alpha: Annotated[float, DECAY] = 0.99
    eps: Annotated[float, FROM_0] = 1e-8
    momentum: Annotated[float, DECAY] = 0.0

    @property
    def update_vectors(self) -> float:
        return 18 if self.momentum else 13

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """State: v, and m if there is momentum."""
        names = ["mean_square", "momentum"] if self.momentum else ["mean_square"]
        return _RMSPropApplier(self, {name: torch.zeros(num_elements, dtype=dtype) for name in names})


class _RMSPropApplier(Applier):
    def __init__(self, rule: RMSProp, state: dict[str, Tensor]) -> None:
        super().__init__(**state)
        self._rule, self._v, self._m = rule, state["mean_square"], state.get("momentum")

    def apply(
        self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float, echo: Tensor | None = None
    ) -> None:
        rule, v, m = self._rule, self._v, self._m
        v.mul_(rule.alpha).addcmul_(gradient, gradient, value=1 - rule.alpha)
        scale = v.sqrt().add_(rule.eps)
        if m is None:
            x.addcdiv_(gradient, scale, value=-learning_rate)
        else:
            m.mul_(rule.momentum).addcdiv_(gradient, scale)
            x.sub_(m, alpha=learning_rate)


@dataclass(frozen=True, kw_only=True)
class Adam(ApplyRule):
    """Adam with bias correction, as torch.optim.Adam. Costs: two vectors of state and a count.

    Args:
        beta1: share of the old mean gradient that is kept.
        beta2: share of the old mean square that is kept.
        eps: added to the root of the mean square.
    """

    beta1: Annotated[float, DECAY] = 0.9
    beta2: Annotated[float, DECAY] = 0.999
    eps: Annotated[float, FROM_0] = 1e-8

    @property
    def update_vectors(self) -> float:
        return 18

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """State: mean gradient, mean square, number of updates."""
        mean, mean_square = (torch.zeros(num_elements, dtype=dtype) for _ in range(2))
        return _AdamApplier(self, mean, mean_square, torch.zeros((), dtype=torch.int64))


class _AdamApplier(Applier):
    def __init__(self, rule: Adam, mean: Tensor, mean_square: Tensor, updates: Tensor) -> None:
        super().__init__(mean=mean, mean_square=mean_square, updates=updates)
        self._rule, self._m, self._v, self._updates = rule, mean, mean_square, updates

    def apply(
        self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float, echo: Tensor | None = None
    ) -> None:
        rule, m, v = self._rule, self._m, self._v
        self._updates.add_(1)
        t = int(self._updates)
        m.lerp_(gradient, 1 - rule.beta1)
        v.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
        scale = v.sqrt().div_((1 - rule.beta2**t) ** 0.5).add_(rule.eps)
        x.addcdiv_(m, scale, value=-learning_rate / (1 - rule.beta1**t))
