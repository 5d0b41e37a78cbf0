"""Outer optimizers: step the common parameters with the mean of the workers' changes.

Pure functions on vectors (n,): nothing is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from paceline.specs.bounds import ABOVE_0, DECAY
from paceline.specs.registry import Registry
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class Outer:
    """One step on the common parameters. Weight decay is the inner optimizer's."""

    #: Whether a step needs the previous step's momentum.
    has_momentum: ClassVar[bool] = False

    rate: Annotated[float, ABOVE_0] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def step(
        self, x: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parameters (n,) after a step, and its momentum (n,).

        Args:
            x: the common parameters, from which the workers began.
            change: x minus the mean of the workers' parameters: the outer gradient.
            momentum: of the previous step; None: zero.
        """
        raise TypeError(f"{type(self).__name__} must define step")


@dataclass(frozen=True, kw_only=True)
class OuterSGD(Outer):
    """x - rate * change; with rate 1 that is the mean of the workers' parameters: local SGD.

    Args:
        rate: of the step.
    """

    def step(
        self, x: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sub(x, change, alpha=self.rate), None


@dataclass(frozen=True, kw_only=True)
class Nesterov(Outer):
    """Nesterov's momentum, as `torch.optim.SGD(nesterov=True)` has it: m = mu m + change; x - rate (change + mu m).

    Its first step is 1 + mu times as long as one without momentum, so rates for different momenta are not comparable.

    Args:
        rate: of the step.
        momentum: mu.
    """

    rate: Annotated[float, ABOVE_0] = 0.7
    momentum: Annotated[float, DECAY] = 0.9

    has_momentum: ClassVar[bool] = True

    def step(
        self, x: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        m = change if momentum is None else torch.add(change, momentum, alpha=self.momentum)
        direction = torch.add(change, m, alpha=self.momentum)
        return torch.sub(x, direction, alpha=self.rate), m


outer_registry = Registry("outer optimizer")
outer_registry.register("sgd", OuterSGD)
outer_registry.register("nesterov", Nesterov)
