"""AdaGrad on a shard: torch's, and the two asynchronous forms that ignore delay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.specs.bounds import FROM_0

__all__ = ["Adagrad", "AsyncAdagrad"]


@dataclass(frozen=True, kw_only=True)
class Adagrad(ApplyRule):
    """z <- z + g^2; x <- x - rate g / (sqrt(z) + eps). Costs: one vector of state.

    Use when: features are sparse, or many asynchronous workers would each need their own rate; the rate is then typically
    about ten times the best fixed one. Used by Downpour SGD, with a warm start.

    Args:
        initial: z before the first gradient.
        eps: added to the root.

    Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012.
    """

    initial: Annotated[float, FROM_0] = 0.0
    eps: Annotated[float, FROM_0] = 1e-10

    @property
    def default_learning_rate(self) -> float | None:
        """Far below SGD's: the first steps have this length in every coordinate."""
        return 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.initial and not self.eps:
            raise ValueError("initial and eps cannot both be 0: a gradient of 0 would divide by 0")

    @property
    def update_vectors(self) -> float:
        return 11

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        return _AdagradApplier(self.eps, torch.full((num_elements,), self.initial, dtype=dtype))


class _AdagradApplier(Applier):
    def __init__(self, eps: float, z: Tensor) -> None:
        super().__init__(sum_of_squares=z)
        self._eps, self._z = eps, z

    def apply(
        self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float, echo: Tensor | None = None
    ) -> None:
        self._z.addcmul_(gradient, gradient)
        x.addcdiv_(gradient, self._z.sqrt().add_(self._eps), value=-learning_rate)


@dataclass(frozen=True, kw_only=True)
class AsyncAdagrad(ApplyRule):
    """AdaGrad with z = 1 + sum of g^2, applied to gradients of any age as they arrive: the baseline of AdaptiveRevision.

    Costs: one vector of state (descent) or two (dual averaging).
    Not: `adaptive-revision`, which tracks what overlapped with a gradient and corrects steps that were too long.

    Args:
        form: `descent`: x <- x - rate g / sqrt(z). `dual-averaging`: x = x_0 - rate (sum of g) / sqrt(z), all gradients at the
            newest rate.

    Reference: McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online Learning", NIPS 2014
        (AsyncAda-GD, and AsyncAda-DA after Duchi, Jordan and McMahan 2013).
    """

    form: Literal["descent", "dual-averaging"] = "descent"

    @property
    def update_vectors(self) -> float:
        return 11 if self.form == "descent" else 18

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """State: z; for dual averaging also the sum of gradients and the last rate."""
        if self.form == "descent":
            return _AdagradApplier(0.0, torch.ones(num_elements, dtype=dtype))
        return _DualAveragingApplier(num_elements, dtype)


class _DualAveragingApplier(Applier):
    """Never stores x_0: each step undoes the old total step and makes the new one.

    The total step uses the newest rate, so parameters without a new gradient also move when the rate changes.
    """

    leaves_out: ClassVar[bool] = True

    def __init__(self, num_elements: int, dtype: torch.dtype) -> None:
        self._z = torch.ones(num_elements, dtype=dtype)
        self._sum = torch.zeros(num_elements, dtype=dtype)
        self._rate = torch.zeros((), dtype=torch.float64)
        super().__init__(sum_of_squares=self._z, sum_of_gradients=self._sum, rate=self._rate)

    def apply(
        self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float, echo: Tensor | None = None
    ) -> None:
        x.addcdiv_(self._sum, self._z.sqrt(), value=float(self._rate))
        self._z.addcmul_(gradient, gradient)
        self._sum.add_(gradient)
        self._rate.fill_(learning_rate)
        x.addcdiv_(self._sum, self._z.sqrt(), value=-learning_rate)
