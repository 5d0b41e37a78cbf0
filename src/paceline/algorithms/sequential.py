"""SGD with one worker: the baseline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from paceline.algorithms.base import Algorithm
from paceline.algorithms.plain import work_plainly
from paceline.algorithms.server.alone import work_alone
from paceline.algorithms.server.delay import Delay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.user import UserOptimizer
from paceline.errors import UsageError
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, RacingParameters


@dataclass(frozen=True, kw_only=True)
class Sequential(Algorithm):
    """Plain SGD: one worker, one update after the other.

    Costs per step: nothing beyond the user's own step; with a delay, one vector for every gradient that waits.
    Clipping acts on the computed gradient; with a delay, before it waits.
    Use when: a comparison needs a baseline, or the problem is small; with a delay, to study staleness without random timing.
    Not: another method with one worker, which makes the same updates and keeps its state for more workers.

    Args:
        delay: number of updates that every gradient waits before the optimizer steps with it; None: no wait.

    Differs from the paper: steps have the optimizer's rate, which need not fall. The delay is our own: it emulates the
    staleness of many workers.

    Reference: Robbins and Monro, "A Stochastic Approximation Method", Annals of Mathematical Statistics 22 (3), 1951.
    """

    delay: Delay | None = None

    max_workers: ClassVar[int | None] = 1

    @property
    def needs(self) -> Needs:
        return Needs("racing")

    @property
    def lets_gradients_wait(self) -> bool:
        return self.delay is not None

    def delayed(self, delay: Delay) -> Sequential:
        if self.delay is not None:
            raise UsageError("This sequential already has a delay: leave out one of the two.")
        return dataclasses.replace(self, delay=delay)

    def work(self, replica: Replica, ports: Ports[RacingParameters]) -> None:
        if self.delay is not None:
            work_alone(replica, ports, Delayed(delay=self.delay, rule=UserOptimizer()))
            return
        work_plainly(replica, ports)
