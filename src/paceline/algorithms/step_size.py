"""Staleness-dependent step sizes: a factor on a gradient of staleness tau.

Papers write alpha(tau) for plain SGD; a factor instead leaves learning rate schedules alone. It scales the gradient: on the
rate it would also shrink the momentum, and so other gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.ports.ports import Ports
from paceline.ports.shared import SharedParameters
from paceline.specs.bounds import COUNT, SHARE
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """A factor on each gradient as a function of its staleness, for optimizers whose steps are linear in it, such as SGD."""

    #: Whether `weight` reads `ports.staleness`, which is then updated at every update.
    needs_counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def option(self) -> str:
        """The option as the user writes it; empty if all factors are 1."""
        return f"step_size={type(self).__name__.removesuffix('Step').lower()}"

    @property
    def unrecorded(self) -> str:
        """As `Algorithm.unrecorded`, of the factors."""
        return "the numbers of late updates that factors followed" if self.needs_counts else ""

    def weight(self, staleness: int, ports: Ports[SharedParameters]) -> float:
        """The factor for a gradient of this staleness."""
        raise TypeError(f"{type(self).__name__} must define weight")


@dataclass(frozen=True, kw_only=True)
class FullStep(StepSize):
    """The full step at any staleness."""

    @property
    def option(self) -> str:
        return ""

    def weight(self, staleness: int, ports: Ports[SharedParameters]) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class InverseStep(StepSize):
    """1 / (staleness + 1).

    Reference: after Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2015, arXiv:1511.05950,
        which divides by the staleness and so leaves 0 undefined; one is added here.
    """

    def weight(self, staleness: int, ports: Ports[SharedParameters]) -> float:
        return 1.0 / (staleness + 1)


@dataclass(frozen=True, kw_only=True)
class ExponentialStep(StepSize):
    """exp(-beta staleness) with beta = (2 / t) ln(1 + t / 2): it meets 1 / (1 + t / 2) at half the threshold t.

    Args:
        threshold: staleness t that counts as very stale; None: number of workers + 1.

    Reference: AdaSGD of Damaskinos et al., "FLeet: Online Federated Learning via Staleness Awareness and Performance
        Prediction", Middleware 2020.
    """

    threshold: Annotated[int, COUNT] | None = None

    def weight(self, staleness: int, ports: Ports[SharedParameters]) -> float:
        threshold = self.threshold if self.threshold is not None else ports.num_workers + 1
        beta = 2.0 / threshold * math.log(1.0 + threshold / 2.0)
        return math.exp(-beta * staleness)


@dataclass(frozen=True, kw_only=True)
class TailStep(StepSize):
    """1 + A (1 - 2 F(staleness)): fresh gradients are amplified, stale ones dampened; between 1 - A and 1 + A.

    F(tau) is the share of updates so far with a smaller staleness, counted over all workers. Differs from the authors'
    program, which samples F once, between updates 10 m and 15 m of m workers: here F is updated from update 10 m on, and
    the factor is 1 before.

    Args:
        amplitude: A, 0 to 1.

    Reference: TAIL-tau of Bäckström et al., "ASAP.SGD: Instance-based Adaptiveness to Staleness in Asynchronous SGD",
        ICML 2022.
    """

    amplitude: Annotated[float, SHARE] = 1.0

    needs_counts: ClassVar[bool] = True

    def weight(self, staleness: int, ports: Ports[SharedParameters]) -> float:
        if ports.staleness.total() < 10 * ports.num_workers:
            return 1.0
        return 1.0 + self.amplitude * (1.0 - 2.0 * ports.staleness.share_below(staleness))
