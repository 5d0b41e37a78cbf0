"""The evidence on each candidate from short runs, simulations and fitted models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advice.answer import Candidate, Target
from paceline.advice.campaign import Budget, Campaign
from paceline.advice.convergence import fit, gap, of_gap
from paceline.advice.pool import Pool
from paceline.advice.program import Observed
from paceline.advice.ranking import Evidence, LogSpread, half_width, progress_error, within_factor
from paceline.advice.short_runs import Rate, ShortRuns
from paceline.planner.convergence_model import ConvergenceModel
from paceline.planner.estimate import Estimate
from paceline.planner.system_model import SystemModel
from paceline.planner.time_to_loss import TimeToLoss

__all__ = ["convergence_models", "gathered", "progress_spread"]

_ENDS = (1.1, 1.3)  # times the budget: when no fit begins any more, and when those that go on are given up


def convergence_models(campaign: Campaign, target: Target, pool: Pool, budget: Budget) -> dict[str, ConvergenceModel]:
    """Hemingway's model of each algorithm that was simulated; one worker's curves are every algorithm's."""
    jobs: dict[str, list[tuple[int, Observed]]] = {one.algorithm: [] for one in campaign.found}
    for algorithm, runs in jobs.items():
        for one in campaign.found:
            if one.algorithm == algorithm or one.workers == 1:
                runs += [(one.workers, run) for run in campaign.runs(one)]
    names = list(jobs)
    begin_s, end_s = (budget.at(share) for share in _ENDS)
    found = pool.map(fit, [(target, jobs[one]) for one in names], begin_until_s=begin_s, end_until_s=end_s)
    return {algorithm: model for algorithm, model in zip(names, found, strict=True) if model is not None}


def gathered(
    candidates: Sequence[Candidate],
    target: Target,
    campaign: Campaign,
    models: Mapping[str, ConvergenceModel],
    trials: ShortRuns | None,
) -> list[Evidence]:
    """The evidence on each candidate."""
    found = []
    systems: dict[str, SystemModel | None] = {
        algorithm: trials.system(algorithm) if trials is not None else _simulated_system(algorithm, campaign)
        for algorithm in dict.fromkeys(one.algorithm for one in candidates)
    }
    value = target.accuracy if target.accuracy is not None else target.loss
    assert value is not None
    for one in candidates:
        model = models.get(one.algorithm)
        system = _own_speed(one, campaign, trials) or systems[one.algorithm]
        modelled, samples, at_deadline = None, None, None
        if model is not None and system is not None:
            h = TimeToLoss(system=system, convergence=model)
            wanted = gap(target, value)
            modelled, samples = h.time_to(wanted, one.workers), model.iterations_to(wanted, one.workers)
            if target.deadline_s is not None:
                at_deadline = _turned(target, h.loss(target.deadline_s, one.workers))
        found.append(
            Evidence(
                candidate=one,
                rate=trials.rate(one) if trials is not None else None,
                runs=campaign.runs(one),
                modelled=modelled,
                modelled_samples=samples,
                modelled_at_deadline=at_deadline,
            )
        )
    return found


def progress_spread(target: Target, trials: ShortRuns, campaign: Campaign, seeds: LogSpread | None) -> LogSpread | None:
    """Real against simulated progress, beyond what one further seed explains; None: there is nothing to compare."""
    errors = []
    for one, runs in trials.runs.items():
        for run in runs:
            if (error := progress_error(target, run, campaign.runs(one))) is not None:
                errors.append(error)
    if len(errors) < 2:
        return None
    explained = 2 * seeds.deviation**2 if seeds is not None else 0.0
    squares = max(0.0, float(np.mean(np.square(errors))) - explained)
    return LogSpread(deviation=math.sqrt(squares), freedom=float(len(errors) - 1))


@dataclass(frozen=True, kw_only=True)
class _OwnSpeed:
    """Seconds per sample of a candidate that has run itself: a slow worker makes its number of workers unlike all others."""

    rate: Rate

    def predict(self, workers: int) -> Estimate:
        half = half_width([LogSpread(deviation=self.rate.deviation, freedom=self.rate.freedom)])
        return within_factor(1 / self.rate.value, half)


def _own_speed(one: Candidate, campaign: Campaign, trials: ShortRuns | None) -> _OwnSpeed | None:
    """From its short runs; with a given cluster from its simulations. None if there are none.

    The simulations of what has not run were matched to the system model, and tell no more than that.
    """
    if trials is not None:
        return _OwnSpeed(rate=trials.rate(one)) if one in trials.runs else None
    rates = [run.rates[0] for run in campaign.runs(one) if run.rates and run.rates[0] > 0]
    return _OwnSpeed(rate=Rate(value=float(np.median(rates)))) if rates else None


def _simulated_system(algorithm: str, campaign: Campaign) -> SystemModel | None:
    """Ernest's model of seconds per sample, from simulations."""
    points = [
        (one.workers, 1 / run.rates[0])
        for one in campaign.found
        if one.algorithm == algorithm or one.workers == 1
        for run in campaign.runs(one)
        if run.rates and run.rates[0] > 0
    ]
    if not points:
        return None
    return SystemModel.fit([m for m, _ in points], [time_s for _, time_s in points], relative=True)


def _turned(target: Target, one: Estimate) -> Estimate:
    value, low, high = (of_gap(target, end) for end in (one.value, one.low, one.high))
    return Estimate(value=value, low=min(low, high), high=max(low, high), extrapolation=one.extrapolation)
