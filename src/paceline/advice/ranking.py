"""From short runs, simulations and models to predictions with intervals, the best first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advice.answer import Candidate, Prediction, Target
from paceline.advice.convergence import gap
from paceline.advice.program import Observed
from paceline.advice.short_runs import Rate
from paceline.observe.words import counted
from paceline.planner.estimate import Estimate, deviations

__all__ = [
    "Evidence",
    "LogSpread",
    "best_value",
    "half_width",
    "order",
    "predict",
    "progress_error",
    "seeds_spread",
    "value_at",
    "value_text",
    "within_factor",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSpread:
    """A standard deviation of logarithms, and from how many independent values it is.

    Args:
        deviation: of one value about what is predicted for it.
        freedom: degrees of freedom; infinite: it is known.
    """

    deviation: float
    freedom: float


UNKNOWN_SEEDS = LogSpread(
    deviation=0.15, freedom=4.0
)  # where no candidate was simulated twice: about what three seeds show


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The evidence on a candidate.

    Args:
        rate: of all workers together; None: the cluster was given, not measured.
        runs: its simulations, in seconds of the machine that is asked about.
        modelled: seconds to the target by the fitted models; None: they cannot say.
    """

    candidate: Candidate
    rate: Rate | None
    runs: tuple[Observed, ...]
    modelled: Estimate | None = None
    modelled_samples: Estimate | None = None
    modelled_at_deadline: Estimate | None = None


def seeds_spread(evidence: Iterable[Evidence]) -> LogSpread | None:
    """How much seeds of one candidate differ in their time, over all that were repeated; None: none was."""
    squares, freedom = 0.0, 0
    for one in evidence:
        logs = np.log([run.reached_s for run in one.runs if run.reached_s])
        if len(logs) > 1:
            squares += float(np.sum((logs - logs.mean()) ** 2))
            freedom += len(logs) - 1
    return LogSpread(deviation=math.sqrt(squares / freedom), freedom=float(freedom)) if freedom else None


def progress_error(target: Target, real: Observed, simulated: Sequence[Observed]) -> float | None:
    """By how much, as a logarithm, simulations need more samples than a short real run did for where that one came to.

    None: the real run came to nothing that the simulations passed, too.
    """
    found = []
    points = [(samples, gap(target, value)) for _, samples, value in real.curve if samples > 0 and math.isfinite(value)]
    if not points:
        return None
    least = min(value for _, value in points)
    took = next(samples for samples, value in points if value <= least)
    for run in simulated:
        passed = [(samples, gap(target, value)) for _, samples, value in run.curve if samples > 0]
        at = next((k for k, (_, value) in enumerate(passed) if value <= least), None)
        if at is None:
            continue
        samples = passed[at][0]
        if at and passed[at - 1][1] > least and passed[at][1] > 0:
            (before, above), (after, below) = passed[at - 1], passed[at]
            samples = before * (after / before) ** (math.log(above / least) / math.log(above / below))
        found.append(math.log(samples / took))
    return float(np.median(found)) if found else None


def predict(evidence: Evidence, target: Target, seeds: LogSpread | None, models: LogSpread | None) -> Prediction:
    """What is expected of one candidate.

    The time is the median of the simulated ones. Its interval puts together, as independent shares, how much seeds differ, how
    much runs differ in speed, how much real progress differed from simulated progress, and how often is evaluated.

    Args:
        evidence: what is known.
        target: what is asked.
        seeds: as `seeds_spread` says.
        models: real against simulated progress, beyond what seeds explain; None: it was not compared.
    """
    runs, rate = evidence.runs, evidence.rate
    reached_s = tuple(run.reached_s if run.reached_s is not None else math.inf for run in runs)
    parts = [_of_seeds(seeds, max(1, sum(map(math.isfinite, reached_s))))]
    parts += [LogSpread(deviation=rate.deviation, freedom=rate.freedom)] if rate is not None else []
    parts += [models] if models is not None else []
    said = [rate.extrapolation] if rate is not None and rate.extrapolation else []
    time_s, samples, why_not = None, None, ""
    median_s = float(np.median(reached_s)) if runs else math.inf
    if math.isfinite(median_s):
        parts.append(_resolution(target, runs))
        half = half_width(parts)
        time_s = within_factor(median_s, half, open_above=not all(map(math.isfinite, reached_s)))
        samples = _samples(runs, [parts[0], *parts[2:]] if rate is not None else parts)
    else:
        why_not = _why_not(evidence, target)
        if not why_not and evidence.modelled is not None:
            time_s, more = _extrapolated(evidence)
            samples = evidence.modelled_samples
            said.append(more)
    known = [run for run in runs if run.rates]
    per_s = float(np.median([run.rates[0] for run in known])) if known else rate.value if rate is not None else math.nan
    speed = half_width([LogSpread(deviation=rate.deviation, freedom=rate.freedom)]) if rate is not None else 0.0
    stale = [run.staleness for run in runs if run.staleness is not None]
    return Prediction(
        candidate=evidence.candidate,
        time_s=time_s,
        why_not=why_not if time_s is None else "",
        at_deadline=_at_deadline(evidence, target, half_width(parts)) if target.deadline_s is not None else None,
        samples_per_s=within_factor(per_s, speed),
        samples_to_target=samples,
        simulated_s=reached_s,
        modelled_s=evidence.modelled,
        staleness=float(np.mean(stale)) if stale else None,
        curve=tuple((time_s_, value) for time_s_, _, value in runs[0].curve) if runs else (),
        extrapolation="; ".join(said),
    )


def half_width(parts: Sequence[LogSpread]) -> float:
    """Half of the interval of a logarithm that is off by the sum of independent parts, by Welch's and Satterthwaite's rule."""
    variance = sum(one.deviation**2 for one in parts)
    if variance == 0:
        return 0.0
    freedom = variance**2 / max(1e-300, sum(one.deviation**4 / one.freedom for one in parts))
    return deviations(min(freedom, 1e6)) * math.sqrt(variance)


def within_factor(value: float, half: float, *, open_above: bool = False) -> Estimate:
    """A value whose logarithm is known to within `half`; nothing is known of its upper end where it is open above."""
    return Estimate(value=value, low=value * math.exp(-half), high=math.inf if open_above else value * math.exp(half))


def order(predictions: Iterable[Prediction], target: Target) -> tuple[Prediction, ...]:
    """The best first: the soonest; with a deadline, those that meet it, then by their values; last those that never arrive."""

    def key(one: Prediction) -> tuple[float, ...]:
        m = one.candidate.workers
        if one.time_s is not None and (target.deadline_s is None or one.time_s.value <= target.deadline_s):
            return (0.0, one.time_s.value, m)
        if one.at_deadline is not None:
            return (1.0, gap(target, one.at_deadline.value), m)
        if one.time_s is not None:
            return (2.0, one.time_s.value, m)
        best = best_value(one, target)
        return (3.0, math.inf if best is None else gap(target, best), m)

    return tuple(sorted(predictions, key=key))


def best_value(one: Prediction, target: Target) -> float | None:
    """The best loss or accuracy that its simulation came to."""
    return _best(target, (value for _, value in one.curve))


def _best(target: Target, values: Iterable[float]) -> float | None:
    return min(filter(math.isfinite, values), key=lambda value: gap(target, value), default=None)


def value_at(run: Observed, target: Target, time_s: float) -> float | None:
    """The best loss or accuracy until then; None: the run had ended before, without having reached the target."""
    if run.wall_s < 0.999 * time_s and run.reached_s is None:
        return None
    return _best(target, (value for at_s, _, value in run.curve if at_s <= time_s))


def _of_seeds(seeds: LogSpread | None, number: int) -> LogSpread:
    """The spread of a further seed about the median of this number of seeds."""
    spread = seeds or UNKNOWN_SEEDS
    return dataclasses.replace(spread, deviation=spread.deviation * math.sqrt(1 + 1 / number))


def _resolution(target: Target, runs: Sequence[Observed]) -> LogSpread:
    """An accuracy is known where it is evaluated, in the simulation and in reality: two uniform errors of a step each."""
    shares = [0.0]
    if target.accuracy is not None:
        for run in runs:
            times_s = [time_s for time_s, _, _ in run.curve]
            if run.reached_s in times_s[1:]:
                at = times_s.index(run.reached_s)
                shares.append((times_s[at] - times_s[at - 1]) / times_s[at])
    return LogSpread(deviation=float(np.mean(shares[1:] or shares)) / math.sqrt(6), freedom=math.inf)


def _samples(runs: Sequence[Observed], parts: Sequence[LogSpread]) -> Estimate:
    value = float(np.median([run.reached_samples if run.reached_samples is not None else math.inf for run in runs]))
    return within_factor(value, half_width(parts), open_above=any(run.reached_samples is None for run in runs))


def _why_not(evidence: Evidence, target: Target) -> str:
    """Why a candidate does not arrive at all; "" where it might, later."""
    runs, number = evidence.runs, len(evidence.runs)
    crashed = [run for run in runs if run.outcome == "crashed"]
    if crashed:
        return crashed[0].reason or "its simulation crashed"
    diverged = sum(run.outcome == "diverged" for run in runs)
    if diverged:
        return f"diverged in {diverged} of {counted(number, 'simulation')}"
    if not runs:
        return "it was not simulated: the budget was spent" if evidence.modelled is None else ""
    best = _best(target, (value for run in runs for _, _, value in run.curve))
    at = "an unknown value" if best is None else value_text(target, best)
    come_to = f"at {at} after {max(run.samples for run in runs):,} samples"
    if any(run.ended_itself and run.reached_s is None for run in runs):
        return f"the program itself ends before, {come_to}"
    within = f"not within the {max(run.wall_s for run in runs):.3g} s that were simulated"
    return "" if evidence.modelled is not None else f"{within}, {come_to}"


def value_text(target: Target, value: float) -> str:
    """In a sentence: `an accuracy of 0.95`, `a loss of 0.12`."""
    return f"an accuracy of {value:.4g}" if target.accuracy is not None else f"a loss of {value:.4g}"


def _extrapolated(evidence: Evidence) -> tuple[Estimate, str]:
    """The models' time, not before the simulations' ends, and in words what that is."""
    assert evidence.modelled is not None
    found, seen_s = evidence.modelled, max((run.wall_s for run in evidence.runs), default=0.0)
    if not evidence.runs:
        return found, "by the fitted models, not simulated"
    said = f"by the fitted models, as it did not arrive in the {seen_s:.3g} s that were simulated"
    if found.high <= seen_s:
        later = Estimate(value=seen_s, low=seen_s, high=math.inf)
        return later, f"{said}, which they did not expect: at least that long"
    return Estimate(value=max(found.value, seen_s), low=max(found.low, seen_s), high=found.high), said


def _at_deadline(evidence: Evidence, target: Target, half: float) -> Estimate | None:
    assert target.deadline_s is not None
    then_s = target.deadline_s
    at, early, late = (
        [value for run in evidence.runs if (value := value_at(run, target, then_s * factor)) is not None]
        for factor in (1.0, math.exp(-half), math.exp(half))
    )
    if not at or any(run.outcome in ("crashed", "diverged") for run in evidence.runs):
        return evidence.modelled_at_deadline if not at else None
    value = float(np.median(at))
    ends = [*at, *early, *late]
    return Estimate(value=value, low=min(ends), high=max(ends))
