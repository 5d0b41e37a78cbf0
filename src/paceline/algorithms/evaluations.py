"""Further gradients of one step, where the optimizers of all workers evaluate closures: each evaluation is a round."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.algorithms.same_rounds import UNEQUAL_EVALUATIONS, SameRounds
from paceline.errors import UsageError
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import ReplicatedParameters

__all__ = ["Evaluations"]


class Evaluations:
    """What a program of equal replicas offers an optimizer that evaluates its closure as often as it likes.

    Equal parameters, losses and gradients let all optimizers decide alike. Before each evaluation, and at the end of the step,
    all workers tell which of the two comes.

    Costs: per evaluation, what a gradient of the method costs, and two small all-reduces.

    Args:
        replica: this worker's, which finds this in its `evaluations`.
        ports: of its program.
        rounds: where all workers are.
        average: makes the replica's gradient the mean of all, as far as it is not yet.
    """

    def __init__(
        self,
        replica: Replica,
        ports: Ports[ReplicatedParameters],
        rounds: SameRounds,
        average: Callable[[], None],
    ) -> None:
        assert ports.collectives is not None
        self._collectives, self._num_workers = ports.collectives, ports.num_workers
        self._rounds = rounds
        self.average = average
        replica.evaluations = self

    @property
    def are_due(self) -> bool:
        """Whether the loops of the workers with a batch gave the present step a closure."""
        return self._rounds.has_closure

    @property
    def under_way(self) -> bool:
        """Whether an optimizer has evaluated its closure in a step that has not ended."""
        return self._rounds.is_evaluating

    def begin(self) -> None:
        """This worker's optimizer evaluates its closure.

        Raises:
            UsageError: another worker's has made its step by now.
        """
        self._tell(evaluates=True)
        self._rounds.is_evaluating = True

    def end(self) -> None:
        """This worker's optimizer has made its step; raises as `begin`."""
        self._tell(evaluates=False)
        self._rounds.is_evaluating = False

    def _tell(self, *, evaluates: bool) -> None:
        (num_evaluating,) = self._sum(float(evaluates))
        if num_evaluating not in (0, self._num_workers):
            raise UsageError(UNEQUAL_EVALUATIONS)

    def mean(self, loss: float | None, weight: float) -> float | None:
        """The mean of all workers' losses, weighted by samples; None: no worker has one."""
        total, weights = self._sum(*((0.0, 0.0) if loss is None or not weight else (weight * loss, weight)))
        return total / weights if weights else None

    def _sum(self, *numbers: float) -> list[float]:
        told = torch.tensor(numbers, dtype=torch.float64)
        self._collectives.start_all_reduce(told).wait()
        return told.tolist()
