"""Predictions with intervals, from short runs, simulations and models; the best first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advice.answer import Candidate, Prediction, Target
from paceline.advice.campaign import Campaign
from paceline.advice.program import Observed
from paceline.advice.short_runs import Rate
from paceline.advice.simulations import fit
from paceline.observe.words import counted
from paceline.planner.convergence_model import ConvergenceModel
from paceline.planner.estimate import Estimate, LogSpread, half_width, within_factor
from paceline.planner.system_model import SystemModel
from paceline.planner.time_to_loss import TimeToLoss

_ENDS = (1.1, 1.3)  # times the budget: no fit begins after the first; those that run at the second are abandoned
_UNKNOWN_SEEDS = LogSpread(deviation=0.15, freedom=4.0)  # if no candidate was simulated twice


def convergence_models(campaign: Campaign) -> dict[str, ConvergenceModel]:
    """Hemingway's model of each simulated algorithm; curves of one worker count for every algorithm."""
    jobs: dict[str, list[tuple[int, Observed]]] = {one.algorithm: [] for one in campaign.found}
    for algorithm, runs in jobs.items():
        for one in campaign.found:
            if one.algorithm == algorithm or one.workers == 1:
                runs += [(one.workers, run) for run in campaign.runs(one)]
    names = list(jobs)
    begin_s, end_s = (campaign.budget.at(share) for share in _ENDS)
    found = campaign.pool.map(
        fit, [(campaign.target, jobs[one]) for one in names], begin_until_s=begin_s, end_until_s=end_s
    )
    return {algorithm: model for algorithm, model in zip(names, found, strict=True) if model is not None}


@dataclass(kw_only=True)
class Predictor:
    """Predicts each candidate from the measurements of all.

    The time is the median of the simulations. Its interval combines, as independent parts, the spread between seeds, the
    spread of speed between runs, the difference between real and simulated progress, and the spacing of evaluations.

    Attributes:
        seeds: spread of the time between seeds of one candidate; None: no candidate was repeated.
        progress: spread of real against simulated progress, beyond that of seeds; None: not compared.
    """

    campaign: Campaign
    models: Mapping[str, ConvergenceModel]

    def __post_init__(self) -> None:
        self.target, self.trials = self.campaign.target, self.campaign.trials
        self.seeds = self._seeds_spread()
        self.progress = self._progress_spread()

    def predict(self, one: Candidate) -> Prediction:
        target, runs = self.target, self.campaign.runs(one)
        rate = self.trials.rate(one) if self.trials is not None else None
        modelled, modelled_samples, modelled_at_deadline = self._modelled(one)
        reached_s = tuple(run.reached_s if run.reached_s is not None else math.inf for run in runs)
        parts = [self._of_seeds(max(1, sum(map(math.isfinite, reached_s))))]
        parts += [self.progress] if self.progress is not None else []
        speed = [rate.spread] if rate is not None else []
        said = [rate.extrapolation] if rate is not None and rate.extrapolation else []
        time_s, samples, why_not = None, None, ""
        median_s = float(np.median(reached_s)) if runs else math.inf
        if math.isfinite(median_s):
            parts.append(_resolution(target, runs))
            open_above = not all(map(math.isfinite, reached_s))
            time_s = within_factor(median_s, half_width([*parts, *speed]), open_above=open_above)
            needed = [run.reached_samples if run.reached_samples is not None else math.inf for run in runs]
            samples = within_factor(float(np.median(needed)), half_width(parts), open_above=open_above)
        elif not (why_not := _why_not(runs, target, is_modelled=modelled is not None)) and modelled is not None:
            time_s, more = _extrapolated(modelled, runs)
            samples = modelled_samples
            said.append(more)
        at_deadline = None
        if target.deadline_s is not None:
            half = half_width([*parts, *speed])
            at_deadline = _at_deadline(runs, target, target.deadline_s, half, modelled_at_deadline)
        known = [run.rates[0] for run in runs if run.rates]
        per_s = float(np.median(known)) if known else rate.value if rate is not None else math.nan
        stale = [run.staleness for run in runs if run.staleness is not None]
        return Prediction(
            candidate=one,
            time_s=time_s,
            why_not=why_not if time_s is None else "",
            at_deadline=at_deadline,
            samples_per_s=within_factor(per_s, half_width(speed)),
            samples_to_target=samples,
            simulated_s=reached_s,
            modelled_s=modelled,
            staleness=float(np.mean(stale)) if stale else None,
            curve=tuple((time_s_, value) for time_s_, _, value in runs[0].curve) if runs else (),
            extrapolation="; ".join(said),
        )

    def _seeds_spread(self) -> LogSpread | None:
        squares, freedom = 0.0, 0
        for one in self.campaign.found:
            logs = np.log([run.reached_s for run in self.campaign.runs(one) if run.reached_s])
            if len(logs) > 1:
                squares += float(np.sum((logs - logs.mean()) ** 2))
                freedom += len(logs) - 1
        return LogSpread(deviation=math.sqrt(squares / freedom), freedom=float(freedom)) if freedom else None

    def _progress_spread(self) -> LogSpread | None:
        made = self.trials.runs if self.trials is not None else {}
        found = [
            progress_error(self.target, run, self.campaign.runs(one)) for one, runs in made.items() for run in runs
        ]
        errors = [error for error in found if error is not None]
        if len(errors) < 2:
            return None
        explained = 2 * self.seeds.deviation**2 if self.seeds is not None else 0.0
        squares = max(0.0, float(np.mean(np.square(errors))) - explained)
        return LogSpread(deviation=math.sqrt(squares), freedom=float(len(errors) - 1))

    def _of_seeds(self, number: int) -> LogSpread:
        """The spread of another seed about the median of this number of seeds."""
        spread = self.seeds or _UNKNOWN_SEEDS
        return dataclasses.replace(spread, deviation=spread.deviation * math.sqrt(1 + 1 / number))

    def _modelled(self, one: Candidate) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
        """Seconds and samples to the target, and the value at the deadline, by the fitted models."""
        target, model, step_s = self.target, self.models.get(one.algorithm), self._step_s(one)
        if model is None or step_s is None:
            return None, None, None
        h = TimeToLoss(step_s=step_s, convergence=model)
        value = target.accuracy if target.accuracy is not None else target.loss
        assert value is not None
        wanted, at_deadline = target.gap(value), None
        if target.deadline_s is not None:
            found = h.loss(target.deadline_s, one.workers)
            low, high = sorted(target.of_gap(end) for end in (found.low, found.high))
            at_deadline = dataclasses.replace(found, value=target.of_gap(found.value), low=low, high=high)
        return h.time_to(wanted, one.workers), model.iterations_to(wanted, one.workers), at_deadline

    def _step_s(self, one: Candidate) -> Callable[[int], Estimate] | None:
        """Seconds per sample: from its own runs, or else from Ernest's model of its algorithm.

        With a given cluster, both are from simulations. With short runs, the simulations of the other candidates were matched
        to the system model, and add no information to it.
        """
        if self.trials is not None and one not in self.trials.runs:
            model = self.trials.system(one.algorithm)
            return model.predict if model is not None else None
        rates = self.campaign.simulated_rates(one)
        if self.trials is not None or rates:  # a slow worker makes its number of workers unlike all others
            rate = self.trials.rate(one) if self.trials is not None else Rate(value=float(np.median(rates)))
            own = within_factor(1 / rate.value, half_width([rate.spread]))
            return lambda _: own
        points = [
            (other.workers, 1 / rate)
            for other in self.campaign.found
            if other.algorithm == one.algorithm or other.workers == 1
            for rate in self.campaign.simulated_rates(other)
        ]
        return SystemModel.fit(*zip(*points, strict=True), relative=True).predict if points else None


def progress_error(target: Target, real: Observed, simulated: Sequence[Observed]) -> float | None:
    """The log ratio of the samples that simulations and a short real run need to reach the real run's best value.

    None: no simulation passed that value.
    """
    found = []
    points = [(samples, target.gap(value)) for _, samples, value in real.curve if samples > 0 and math.isfinite(value)]
    if not points:
        return None
    least = min(value for _, value in points)
    took = next(samples for samples, value in points if value <= least)
    for run in simulated:
        passed = [(samples, target.gap(value)) for _, samples, value in run.curve if samples > 0]
        at = next((k for k, (_, value) in enumerate(passed) if value <= least), None)
        if at is None:
            continue
        samples = passed[at][0]
        if at and passed[at - 1][1] > least and passed[at][1] > 0:
            (before, above), (after, below) = passed[at - 1], passed[at]
            samples = before * (after / before) ** (math.log(above / least) / math.log(above / below))
        found.append(math.log(samples / took))
    return float(np.median(found)) if found else None


def order(predictions: Iterable[Prediction], target: Target) -> tuple[Prediction, ...]:
    """The soonest first; with a deadline, those that meet it, then by value; last those that never reach the target."""

    def key(one: Prediction) -> tuple[float, ...]:
        m = one.candidate.workers
        if one.time_s is not None and (target.deadline_s is None or one.time_s.value <= target.deadline_s):
            return (0.0, one.time_s.value, m)
        if one.at_deadline is not None:
            return (1.0, target.gap(one.at_deadline.value), m)
        if one.time_s is not None:
            return (2.0, one.time_s.value, m)
        best = target.best(value for _, value in one.curve)
        return (3.0, math.inf if best is None else target.gap(best), m)

    return tuple(sorted(predictions, key=key))


def _resolution(target: Target, runs: Sequence[Observed]) -> LogSpread:
    """Accuracy is known only at evaluations, simulated and real: two uniform errors of one evaluation interval each."""
    shares = [0.0]
    if target.accuracy is not None:
        for run in runs:
            times_s = [time_s for time_s, _, _ in run.curve]
            if run.reached_s in times_s[1:]:
                at = times_s.index(run.reached_s)
                shares.append((times_s[at] - times_s[at - 1]) / times_s[at])
    return LogSpread(deviation=float(np.mean(shares[1:] or shares)) / math.sqrt(6), freedom=math.inf)


def _why_not(runs: Sequence[Observed], target: Target, *, is_modelled: bool) -> str:
    """Why a candidate never reaches the target; "" if it may."""
    crashed = [run for run in runs if run.outcome == "crashed"]
    if crashed:
        return crashed[0].reason or "its simulation crashed"
    diverged = sum(run.outcome == "diverged" for run in runs)
    if diverged:
        return f"diverged in {diverged} of {counted(len(runs), 'simulation')}"
    if not runs:
        return "" if is_modelled else "it was not simulated, because the budget was spent"
    best = target.best(value for run in runs for _, _, value in run.curve)
    at = "an unknown value" if best is None else target.text(best)
    come_to = f"at {at} after {max(run.samples for run in runs):,} samples"
    if any(run.ended_itself and run.reached_s is None for run in runs):
        return f"the program itself ends before, {come_to}"
    within = f"not within the {max(run.wall_s for run in runs):.3g} s that were simulated"
    return "" if is_modelled else f"{within}, {come_to}"


def _extrapolated(modelled: Estimate, runs: Sequence[Observed]) -> tuple[Estimate, str]:
    """The models' time, at least as long as the simulations, and a remark on it."""
    if not runs:
        return modelled, "by the fitted models, not simulated"
    seen_s = max(run.wall_s for run in runs)
    said = f"by the fitted models: it did not reach the target in {seen_s:.3g} simulated seconds"
    if modelled.high <= seen_s:
        later = Estimate(value=seen_s, low=seen_s, high=math.inf)
        return later, f"{said}, although the models expected it; a lower bound"
    return Estimate(value=max(modelled.value, seen_s), low=max(modelled.low, seen_s), high=modelled.high), said


def _at_deadline(
    runs: Sequence[Observed], target: Target, then_s: float, half: float, modelled: Estimate | None
) -> Estimate | None:
    def values_at(time_s: float) -> list[float]:
        """The best losses or accuracies until then, except of runs that ended earlier without reaching the target."""
        lasted = [run for run in runs if run.wall_s >= 0.999 * time_s or run.reached_s is not None]
        bests = [target.best(value for at_s, _, value in run.curve if at_s <= time_s) for run in lasted]
        return [one for one in bests if one is not None]

    at, early, late = (values_at(then_s * factor) for factor in (1.0, math.exp(-half), math.exp(half)))
    if not at:
        return modelled
    if any(run.outcome in ("crashed", "diverged") for run in runs):
        return None
    ends = [*at, *early, *late]
    return Estimate(value=float(np.median(at)), low=min(ends), high=max(ends))
