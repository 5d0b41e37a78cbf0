"""Short real runs: which ones to make, and the speed of each candidate that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.advice.answer import Candidate, Measured, Target
from paceline.advice.candidates import ALONE
from paceline.advice.program import Observed, Program, mean_rate
from paceline.errors import PacelineError, first_line
from paceline.planner.estimate import Estimate, LogSpread
from paceline.planner.system_model import SystemModel, system_features

_UNKNOWN = 0.3  # standard deviation of a rate's logarithm, if a model does not give it
_LEAST = 0.02  # its minimum between two runs: a few repeats may be equal by chance
_RIDGE = 1e-4  # for columns of norm 1: the variance stays finite with fewer runs than coefficients


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A candidate's speed in samples per second, and its uncertainty."""

    value: float
    spread: LogSpread = field(default_factory=LogSpread)  # of another run's rate
    extrapolation: str = ""  # how it was inferred, in words; "" if it was measured


def designed(counts: Sequence[int], number: int) -> list[int]:
    """The numbers of workers to run, at most `number` of `counts`: always the largest; one worker runs in any case.

    The others minimise the variance of the predictions of Ernest's model for `counts`.
    """
    chosen = [1, *sorted(counts)]
    features = system_features(chosen, np.ones(len(chosen)))
    C = features / np.linalg.norm(features, axis=0)
    rows = dict(zip(chosen, C, strict=True))

    def variance_without(dropped: int) -> float:
        A = np.stack([rows[m] for m in chosen if m != dropped])
        return float(np.trace(C @ np.linalg.solve(A.T @ A + _RIDGE * np.eye(len(A.T)), C.T)))

    while len(chosen) > 1 + max(1, number):
        chosen.remove(min(chosen[1:-1], key=variance_without))
    return chosen[1:]


class ShortRuns:
    """Makes short runs and keeps their results."""

    def __init__(self, program: Program, target: Target, slow: Mapping[int, float]) -> None:
        self._program, self._target, self._slow = program, target, slow
        self.runs: dict[Candidate, list[Observed]] = {}
        self.failed: dict[Candidate, str] = {}

    def make(self, candidate: Candidate, *, for_s: float, seed: int) -> None:
        slow = {worker: factor for worker, factor in self._slow.items() if worker < candidate.workers}
        try:
            found = self._program.run(candidate, self._target, for_s=for_s, seed=seed, slow=slow)
        except PacelineError as error:
            self.failed[candidate] = first_line(error)
            return
        if found.outcome == "crashed":
            self.failed[candidate] = found.reason or "its short run crashed"
        elif not found.rates or min(found.rates) <= 0:
            self.failed[candidate] = f"a short run of {for_s:.1f} s made too few steps to measure"
        else:
            self.failed.pop(candidate, None)
            self.runs.setdefault(candidate, []).append(found)

    def measured(self) -> tuple[Measured, ...]:
        """All runs, grouped by candidate."""
        return tuple(
            Measured(
                candidate=candidate,
                samples_per_s=mean_rate(run.rates),
                curve=tuple((time_s, value) for time_s, _, value in run.curve),
            )
            for candidate, runs in self.runs.items()
            for run in runs
        )

    def system(self, algorithm: str) -> SystemModel | None:
        """Ernest's model of seconds per sample, from all its runs and those of one worker; None: it has no run."""
        workers, times_s = [], []
        for candidate, runs in self.runs.items():
            if candidate.algorithm in (algorithm, ALONE) or candidate.workers == 1:
                for run in runs:
                    workers += [candidate.workers] * len(run.rates)
                    times_s += [1 / rate for rate in run.rates]
        if not any(candidate.algorithm == algorithm for candidate in self.runs):
            return None
        return SystemModel.fit(workers, times_s, relative=True)

    def step_error(self, algorithm: str) -> float | None:
        """The largest share by which the system model misses a measured run."""
        model = self.system(algorithm)
        own = [one for one in self.runs if one.algorithm == algorithm]
        if model is None or not own:
            return None
        return max(abs(model.predict(one.workers).value * self.rate(one).value - 1) for one in own)

    def rate(self, candidate: Candidate) -> Rate:
        """A candidate's speed, from its own runs or from the system model of its algorithm.

        Raises:
            KeyError: its algorithm has no runs.
        """
        between = self._between_runs()
        if runs := self.runs.get(candidate):
            logs = [math.log(np.mean(run.rates)) for run in runs]
            value = math.exp(float(np.mean(logs)))
            return Rate(
                value=value, spread=replace(between, deviation=between.deviation * math.sqrt(1 + 1 / len(runs)))
            )
        model = self.system(candidate.algorithm)
        if model is None:
            raise KeyError(candidate)
        predicted = model.predict(candidate.workers)
        said = "its speed is extrapolated from other numbers of workers"
        return Rate(
            value=1 / predicted.value,
            spread=replace(between, deviation=math.hypot(between.deviation, _deviation(predicted))),
            extrapolation=said,
        )

    def _between_runs(self) -> LogSpread:
        """The spread between runs of the same candidate, over all repeated candidates.

        Without repeats: the spread of the parts of all runs about their own means, which tends to be larger.
        """
        repeated = [[math.log(np.mean(run.rates)) for run in runs] for runs in self.runs.values() if len(runs) > 1]
        if not repeated:
            repeated = [[math.log(rate) for rate in run.rates] for runs in self.runs.values() for run in runs]
        squares = sum(float(np.sum((np.array(one) - np.mean(one)) ** 2)) for one in repeated)
        freedom = sum(len(one) - 1 for one in repeated)
        if freedom < 1:
            return LogSpread(deviation=_UNKNOWN, freedom=1.0)
        return LogSpread(deviation=max(_LEAST, math.sqrt(squares / freedom)), freedom=float(freedom))

    @property
    def deviation(self) -> float:
        """Relative standard deviation of a gradient's time: the median of all runs."""
        found = [run.compute_deviation for runs in self.runs.values() for run in runs]
        return float(np.median(found)) if found else 0.0

    @property
    def setup_s(self) -> float:
        """Median time to start workers, without the first run, which also starts the fork server."""
        found = [run.setup_s for runs in self.runs.values() for run in runs]
        return float(np.median(found[1:] or found)) if found else 0.0


def _deviation(one: Estimate) -> float:
    if not (one.low > 0 and math.isfinite(one.high)):
        return _UNKNOWN
    return math.log(one.high / one.low) / 2 / 1.645  # half the 90 % interval is 1.645 standard deviations at least
