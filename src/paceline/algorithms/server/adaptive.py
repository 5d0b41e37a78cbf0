"""RMSProp and Adam on a shard, as torch.optim defines them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.specs.bounds import DECAY, FROM_0


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
        names = ["mean_square", "momentum"] if self.momentum else ["mean_square"]
        return Applier(self._step, **{name: torch.zeros(num_elements, dtype=dtype) for name in names})

    def _step(
        self,
        x: Tensor,
        gradient: Tensor,
        info: UpdateInfo,
        rate: float,
        mean_square: Tensor,
        momentum: Tensor | None = None,
    ) -> None:
        mean_square.mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
        scale = mean_square.sqrt().add_(self.eps)
        if momentum is None:
            x.addcdiv_(gradient, scale, value=-rate)
        else:
            momentum.mul_(self.momentum).addcdiv_(gradient, scale)
            x.sub_(momentum, alpha=rate)


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

    moved_vectors: ClassVar[float | None] = 18

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        mean, mean_square = (torch.zeros(num_elements, dtype=dtype) for _ in range(2))
        return Applier(self._step, mean=mean, mean_square=mean_square, updates=torch.zeros((), dtype=torch.int64))

    def _step(
        self,
        x: Tensor,
        gradient: Tensor,
        info: UpdateInfo,
        rate: float,
        mean: Tensor,
        mean_square: Tensor,
        updates: Tensor,
    ) -> None:
        t = int(updates.add_(1))
        mean.lerp_(gradient, 1 - self.beta1)
        mean_square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        scale = mean_square.sqrt().div_((1 - self.beta2**t) ** 0.5).add_(self.eps)
        x.addcdiv_(mean, scale, value=-rate / (1 - self.beta1**t))
