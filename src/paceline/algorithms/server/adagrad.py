"""AdaGrad on a shard: torch's, and the two asynchronous forms that ignore delay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.update import UpdateInfo
from paceline.specs.bounds import FROM_0


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

    moved_vectors: ClassVar[float | None] = 11

    @property
    def default_learning_rate(self) -> float | None:
        """Far below SGD's: the first steps have this length in every coordinate."""
        return 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.initial and not self.eps:
            raise ValueError("initial and eps cannot both be 0: a gradient of 0 would divide by 0")

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        z = torch.full((num_elements,), self.initial, dtype=dtype)
        return Applier(partial(_descend, eps=self.eps), sum_of_squares=z)


def _descend(x: Tensor, gradient: Tensor, info: UpdateInfo, rate: float, sum_of_squares: Tensor, *, eps: float) -> None:
    sum_of_squares.addcmul_(gradient, gradient)
    x.addcdiv_(gradient, sum_of_squares.sqrt().add_(eps), value=-rate)


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(Adagrad):
    """AdaGrad with one rate per row of a table: z <- z + mean of g^2 over the row; x <- x - rate g / (sqrt(z) + eps).

    Tables are parameters with sparse gradients; all else is as under `adagrad`. A row that lies in two shards has two rates.

    Costs: one vector of state, as for `adagrad`: each element of a row keeps the row's z.
    Use when: rows of embeddings are rare, and their elements should learn equally fast, as in recommenders.

    Reference: FBGEMM's exact row-wise AdaGrad, as for Naumov et al., "Deep Learning Recommendation Model for Personalization
        and Recommendation Systems", 2019, arXiv:1906.00091.
    """

    moved_vectors: ClassVar[float | None] = 13

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        z = torch.full((num_elements,), self.initial, dtype=dtype)
        return Applier(self._step, sum_of_squares=z)

    def _step(self, x: Tensor, gradient: Tensor, info: UpdateInfo, rate: float, sum_of_squares: Tensor) -> None:
        squares = gradient.square()
        sum_of_squares.add_(squares if info.selection is None else info.selection.row_means(squares))
        x.addcdiv_(gradient, sum_of_squares.sqrt().add_(self.eps), value=-rate)


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
    def takes_rows(self) -> bool:
        """Dual averaging moves all elements when the rate changes."""
        return self.form == "descent"

    @property
    def update_vectors(self) -> float:
        return 11 if self.form == "descent" else 18

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        z = torch.ones(num_elements, dtype=dtype)
        if self.form == "descent":
            return Applier(partial(_descend, eps=0.0), sum_of_squares=z)
        rate = torch.zeros((), dtype=torch.float64)  # the last one
        return _DualAveraging(
            _average, sum_of_squares=z, sum_of_gradients=torch.zeros(num_elements, dtype=dtype), rate=rate
        )


class _DualAveraging(Applier):
    leaves_out: ClassVar[bool] = True  # if the rate changes, parameters without a new gradient move as well


def _average(
    x: Tensor,
    gradient: Tensor,
    info: UpdateInfo,
    learning_rate: float,
    sum_of_squares: Tensor,
    sum_of_gradients: Tensor,
    rate: Tensor,
) -> None:
    """Undoes the old total step and makes the new one, so that x_0 is not stored."""
    x.addcdiv_(sum_of_gradients, sum_of_squares.sqrt(), value=float(rate))
    sum_of_squares.addcmul_(gradient, gradient)
    sum_of_gradients.add_(gradient)
    rate.fill_(learning_rate)
    x.addcdiv_(sum_of_gradients, sum_of_squares.sqrt(), value=-learning_rate)
