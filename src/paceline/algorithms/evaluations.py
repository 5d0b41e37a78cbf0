"""Rounds within a step in which all workers' optimizers evaluate their closures."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.algorithms.round import UNEQUAL_EVALUATIONS, Round
from paceline.errors import UsageError
from paceline.ports.ports import Ports
from paceline.ports.shared import ReplicatedParameters


class Evaluations:
    """Lets the optimizers of equal replicas evaluate their closures several times per step.

    With equal parameters, losses and gradients, all optimizers make the same decisions. Before each evaluation, and at the
    end of a step, the workers check that they agree.

    Costs: per evaluation, what a gradient of the method costs, and two small all-reduces.
    """

    def __init__(
        self,
        ports: Ports[ReplicatedParameters],
        round: Round,
        average: Callable[[], None],  # averages the replica's gradient over all workers, unless `backward` has done so
    ) -> None:
        assert ports.collectives is not None
        self._collectives = ports.collectives
        self._round = round
        self.average = average

    @property
    def under_way(self) -> bool:
        """Whether an optimizer has evaluated its closure in a step that has not ended."""
        return self._round.is_evaluating

    def begin(self) -> None:
        """Begins an evaluation; raises `UsageError` if another worker's optimizer has ended its step."""
        self._tell(evaluates=True)
        self._round.is_evaluating = True

    def end(self) -> None:
        """Ends the step; raises the same errors as `begin`."""
        self._tell(evaluates=False)
        self._round.is_evaluating = False

    def _tell(self, *, evaluates: bool) -> None:
        (num_evaluating,) = self._sum(float(evaluates))
        if num_evaluating not in (0, len(self._collectives.members)):
            raise UsageError(UNEQUAL_EVALUATIONS)

    def mean(self, loss: float | None, weight: float) -> float | None:
        """The mean of all workers' losses by their weights; None: no worker has one."""
        total, weights = self._sum(*((0.0, 0.0) if loss is None or not weight else (weight * loss, weight)))
        return total / weights if weights else None

    def _sum(self, *numbers: float) -> list[float]:
        told = torch.tensor(numbers, dtype=torch.float64)
        self._collectives.start_all_reduce(told).wait()
        return told.tolist()
