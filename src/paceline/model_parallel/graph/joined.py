"""A part of a placed model whose worker joins the others' run by itself, without a supervisor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.membership.elastic import JoinedRun
from paceline.membership.environment import Invitation
from paceline.membership.final_mean import FinalMean
from paceline.model_parallel.graph.execute import graph_of
from paceline.model_parallel.graph.plan_data import PlanData
from paceline.model_parallel.graph.program import PlacedProgram
from paceline.optim.flat import model_words
from paceline.worker.memberships.elastic import ElasticMembership, report


def join(environment: Invitation, plan: PlanData, model: nn.Module, worker: int | None) -> JoinedRun:
    """Takes this worker's place in the run that it is invited to, which is its part of the plan; None: the first free one.

    Raises:
        UsageError: the run has another plan or model, or has begun; or the place is taken.
    """
    # Before others wait for this worker:
    plan.check_worker(worker or 0)
    graph_of(plan, model)  # refuses another model
    if environment.of is not None:
        plan.check_workers(environment.of)
    run = JoinedRun(environment, PlacedProgram(), model_words(model), plan.title, worker)
    try:
        plan.check_workers(run.num_workers)
        if run.is_late:
            raise UsageError(
                "The parts of a placed model begin and end together, and this run has begun: start all workers again."
            )
    except UsageError:
        run.close()
        raise
    report(run, environment.out, "started")
    return run


class JoinedPart(ElasticMembership):
    """Its worker's parameters change in its part only, and no mean of models is made."""

    def final_model(self, out: torch.Tensor, given: Any, left: Any) -> FinalMean | None:
        """As in `Membership`; the worker gets the other parts afterwards."""
        self.snapshot(out)
        if not self._run.leaves:
            self._run.end(has_taken_part=True)
        return None

    def write_end(self, model: nn.Module, mean: FinalMean | None) -> None:
        """As in `Membership`; a worker that a signal ends has no whole model."""
        if self._folder is not None:
            self._write_end(self._folder, None if self._run.leaves else model)
        report(self._run, self._folder, "ended", consensus_distance=None, models_in_mean=0, batches_not_given=0)
