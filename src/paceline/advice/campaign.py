"""The order of simulations: a short one of each candidate, then the leaders again with other seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.advice.answer import Candidate, Target
from paceline.advice.candidates import ALONE
from paceline.advice.pool import Pool
from paceline.advice.program import Observed, Program, Shape
from paceline.advice.short_runs import ShortRuns
from paceline.advice.simulations import Job, Simulated, simulate, with_workers
from paceline.simulator import Cluster

_HOW_LONG = 1.5  # times the best time so far: how long others are simulated
_AGAIN = 1.3  # candidates within this factor of the best are simulated again
_MOST_AGAIN = 5
_LONG_AGAIN = 3.0  # times the best time: how long further seeds are
_FIRST_SHARE = 0.4  # of the time for simulations that those of the first round may take
_WORTH = 1.5  # times as many samples are worth a second, longer simulation
_GRACE = 1.25  # times the budget: simulations that still run then are abandoned


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Wall time."""

    total_s: float
    began_s: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return (time.monotonic() - self.began_s) / self.total_s

    def at(self, share: float) -> float:
        return self.began_s + share * self.total_s

    def left_s(self, share: float) -> float:
        return max(0.0, self.at(share) - time.monotonic())


@dataclass(kw_only=True)
class Campaign:
    """The simulations of all candidates."""

    program: Program
    target: Target
    cluster: Cluster  # the machines; without compute time if there are `trials`
    shape: Shape
    slow: Mapping[int, float]  # workers' factors
    trials: ShortRuns | None  # short runs, for the candidates' speeds; None: speeds follow from the cluster
    pool: Pool
    budget: Budget
    seed: int  # of the first simulation of each
    on_progress: Callable[[str, float], None]
    found: dict[Candidate, list[Simulated]] = field(default_factory=dict)
    skipped: list[Candidate] = field(default_factory=list)
    _guess_s: float = 0.0  # wall seconds of a simulated sample, from a discarded simulation

    def screen(self, candidates: Sequence[Candidate], until: float) -> None:
        """One seed of each: a few first, to learn how long they take; then one per algorithm, then all others.

        Later ones are cut off at 1.5 times the best time, because they can no longer be first. If an algorithm's first
        simulation stays far from the target, its other simulations come last.
        """
        heads = self._heads(candidates)
        first = heads[: max(2, self.pool.size)]
        self._time_one(first[0], until)
        cap = self._cap(first, _FIRST_SHARE, until)
        self._run("first simulations", first, limit_s=math.inf, limit_samples=cap, until=until)
        rest = heads[len(first) :]
        cap = self._cap(rest, 0.6, until)
        self._run("each algorithm", rest, limit_s=self._limit_s(), limit_samples=cap, until=until)
        others = [one for one in candidates if one not in heads]
        others.sort(key=lambda one: (self._promise(one), one.workers))
        cap = self._cap(others, 1.0, until)
        self._run("each number of workers", others, limit_s=self._limit_s(), limit_samples=cap, until=until)

    def longer(self, until: float) -> None:
        """Repeats simulations that were cut off before the best time for longer, those closest to the target first."""
        gaps = {one: self._least_gap(one) for one in self.found}
        enough_s = min(self.best_s, 0.999 * (self.target.deadline_s or math.inf))
        cut = [one for one in gaps if math.isfinite(gaps[one]) and self.runs(one)[0].wall_s < enough_s]
        cut = sorted(cut, key=lambda one: (gaps[one], one.workers))[: 2 * max(1, self.pool.size)]
        cap = self._cap(cut, 1.0, until)
        cut = [one for one in cut if cap > _WORTH * self.found[one][0].run.samples]
        before = {one: self.found.pop(one) for one in cut}
        self._run("the closest for longer", cut, limit_s=self._limit_s(), limit_samples=cap, until=until)
        for one in cut:
            self.found.setdefault(one, before[one])
        self.skipped = [one for one in self.skipped if one not in self.found]

    def _least_gap(self, one: Candidate) -> float:
        """The smallest gap to the target in its simulations; infinite if they reached it, ended by themselves, or failed."""
        made = self.found[one]
        if any(run.run.reached_s is not None for run in made) or any(
            run.run.ended_itself or run.run.outcome in ("crashed", "diverged") for run in made
        ):
            return math.inf
        return min((self.target.gap(value) for run in made for _, _, value in run.run.curve), default=math.inf)

    def again(self, seeds: int, until: float) -> None:
        best_s, leaders = self.best_s, self.leaders()
        if not leaders:
            return
        cap = 3 * max(run.run.samples for one in leaders for run in self.found[one])
        limit_s, numbers = _LONG_AGAIN * best_s, range(1, seeds)
        self._run("leaders with other seeds", leaders, numbers, limit_s=limit_s, limit_samples=cap, until=until)

    def leaders(self) -> list[Candidate]:
        """The first candidates that reach the target within 1.3 times the best time, the soonest first."""
        times = {one: self.time_s(one) for one in self.found}
        near = [one for one in times if times[one] <= _AGAIN * self.best_s and math.isfinite(times[one])]
        return sorted(near, key=lambda one: (times[one], one.workers))[:_MOST_AGAIN]

    @property
    def best_s(self) -> float:
        """The best median time so far; infinite if no candidate has reached the target."""
        return min((self.time_s(one) for one in self.found), default=math.inf)

    def time_s(self, candidate: Candidate) -> float:
        times = [run.reached_s if run.reached_s is not None else math.inf for run in self.runs(candidate)]
        return float(np.median(times)) if times else math.inf

    def runs(self, candidate: Candidate) -> tuple[Observed, ...]:
        """The candidate's simulations, in seconds of the machine as measured so far."""
        return tuple(one.run.stretched(self._stretch(candidate)) for one in self.found.get(candidate, []))

    def simulated_rates(self, candidate: Candidate) -> list[float]:
        return [run.rates[0] for run in self.runs(candidate) if run.rates and run.rates[0] > 0]

    def _stretch(self, candidate: Candidate) -> float:
        """How many times slower the machine is than the simulated one, by later measurements."""
        rates = self.found[candidate][0].run.rates
        return 1.0 if self.trials is None or not rates else rates[0] / self.trials.rate(candidate).value

    def _heads(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The fastest number of workers of each algorithm; one worker alone first, then the fastest."""
        heads: dict[str, Candidate] = {}
        for one in candidates:
            before = heads.get(one.algorithm)
            if before is None or self._speed(one) > self._speed(before):
                heads[one.algorithm] = one
        return sorted(heads.values(), key=lambda one: (one.algorithm != ALONE, -self._speed(one), one.algorithm))

    def _speed(self, one: Candidate) -> float:
        return self.trials.rate(one).value if self.trials is not None else float(one.workers)

    def _promise(self, one: Candidate) -> float:
        """Seconds to the target with as many samples as its algorithm's fastest simulation needed; infinite: never reached."""
        samples = [
            run.run.reached_samples
            for other, runs in self.found.items()
            for run in runs
            if other.algorithm == one.algorithm and run.run.reached_samples is not None
        ]
        return min(samples) / self._speed(one) if samples else math.inf

    def _limit_s(self) -> float:
        return _HOW_LONG * self.best_s

    def _cap(self, jobs: Sequence[Candidate], share: float, until: float) -> int:
        """Number of samples for each of these simulations, given this share of the remaining time."""
        left_s = self.budget.left_s(until) * share
        sample_s = self._sample_s()
        if not jobs or not sample_s:
            return 10**12
        rounds = math.ceil(len(jobs) / max(1, self.pool.size))
        return max(20 * self.shape.batch_size, int(left_s / rounds / sample_s))

    def _sample_s(self) -> float:
        """Wall seconds of a simulated sample; 0: not known."""
        least = 50 * self.shape.batch_size  # with fewer samples, loading the data dominates
        took = [
            one.took_s / one.run.samples for runs in self.found.values() for one in runs if one.run.samples >= least
        ]
        if took:
            return float(np.median(took))
        return self._guess_s

    def _time_one(self, candidate: Candidate, until: float) -> None:
        """Measures the time of a gradient by a short simulation, which is discarded."""
        ends = (self.budget.at(until), self.budget.at(_GRACE))
        for batches in (1, 50):  # the first loads the data
            job = self._job(candidate, self.seed, math.inf, batches * self.shape.batch_size)
            result = self.pool.map(simulate, [job], begin_until_s=ends[0], end_until_s=ends[1])[0]
            if result is not None and result.run.samples:
                self._guess_s = result.took_s / result.run.samples

    def _run(
        self, what: str, candidates: Sequence[Candidate], seeds: Sequence[int] = (0,), *, limit_s: float, limit_samples: int,
        until: float,
    ) -> None:  # fmt: skip
        """Simulates each candidate with each seed, relative to the first."""
        jobs = [self._job(one, self.seed + k, limit_s, limit_samples) for k in seeds for one in candidates]
        if not jobs:
            return

        def on_done(number: int) -> None:
            self.on_progress(f"Simulating {what}: {number} of {len(jobs)}", self.budget.spent)

        on_done(0)
        ends = (self.budget.at(until), self.budget.at(_GRACE))
        results = self.pool.map(simulate, jobs, begin_until_s=ends[0], end_until_s=ends[1], on_done=on_done)
        for job, result in zip(jobs, results, strict=True):
            if result is not None:
                self.found.setdefault(job.candidate, []).append(result)
            elif job.candidate not in self.found:
                self.skipped.append(job.candidate)

    def _job(self, one: Candidate, seed: int, limit_s: float, limit_samples: int) -> Job:
        """A simulation at the measured speed, or on the cluster of the candidate's first simulation."""
        if self.target.deadline_s is not None:
            limit_s = min(limit_s, self.target.deadline_s)
        common = {"program": self.program, "candidate": one, "shape": self.shape, "target": self.target}
        common |= {"seed": seed, "limit_samples": limit_samples}
        if before := self.found.get(one):
            limit_s = limit_s / self._stretch(one)
            return Job(**common, cluster=before[0].cluster, limit_s=limit_s)
        base = with_workers(self.cluster, one.workers, self.slow)
        if self.trials is None:
            return Job(**common, cluster=base, limit_s=limit_s)
        speed = self.trials.rate(one).value  # measured with the slow workers
        return Job(**common, cluster=base, limit_s=limit_s, samples_per_s=speed, deviation=self.trials.deviation)
