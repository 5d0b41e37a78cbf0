"""A program whose speed and convergence are formulas, so that the right advice is known."""

import math
from dataclasses import dataclass, field

import numpy as np

from paceline.advice.program import Observed, Shape

ALONE = "sequential"


@dataclass(frozen=True)
class Law:
    """Of one algorithm: m workers make `speed` samples a second each, less `cost` of it for each other worker.

    The error rate after s samples is floor + (1 - floor) exp(-s / scale), and scale grows by `worse` with each other worker.
    """

    speed: float = 1000.0
    cost: float = 0.1
    worse: float = 0.1
    scale: float = 1000.0
    floor: float = 0.01

    def rate(self, m):
        return self.speed * m / (1 + self.cost * (m - 1))

    def samples(self, gap, m):
        return -self.scale * (1 + self.worse * (m - 1)) * math.log((gap - self.floor) / (1 - self.floor))

    def gap(self, samples, m):
        return self.floor + (1 - self.floor) * np.exp(-np.asarray(samples) / (self.scale * (1 + self.worse * (m - 1))))

    def seconds(self, gap, m):
        return self.samples(gap, m) / self.rate(m)


@dataclass
class Planted:
    """A `Program` that computes nothing.

    Args:
        laws: by algorithm; "sequential" is any of them with one worker.
        noise: standard deviation of the logarithm of a run's speed, and of the samples that it needs.
        batch: samples per gradient.
        every: samples between evaluations.
        ends: samples after which the program ends by itself.
        broken: algorithms, or algorithms with a number of workers, whose real runs fail.
    """

    laws: dict[str, Law]
    noise: float = 0.0
    batch: int = 10
    every: int = 50
    ends: float = math.inf
    broken: tuple[str, ...] = ()
    name: str = "planted.py:train"
    simulated: list = field(default_factory=list)
    ran: list = field(default_factory=list)

    def law(self, candidate):
        return self.laws.get(candidate.algorithm) or next(iter(self.laws.values()))

    def run(self, candidate, target, *, for_s, seed, slow):
        from paceline.errors import PacelineError

        if candidate.algorithm in self.broken or f"{candidate.algorithm} {candidate.workers}" in self.broken:
            raise PacelineError("It broke.\nTraceback of nobody's interest")
        self.ran.append(candidate)
        random = np.random.default_rng([seed, len(self.ran)])
        rate = self.law(candidate).rate(candidate.workers) * self._share(candidate, slow) * self._noise(random)
        rates = tuple(rate * math.exp(0.01 * one) for one in random.standard_normal(8))
        return self._observed(candidate, target, rates, rate, for_s, math.inf, random, reaches=False)

    def shape(self):
        return Shape(num_parameters=100, batch_size=self.batch)

    def simulate(self, candidate, cluster, target, *, limit_s, limit_samples, seed):
        self.simulated.append((candidate, seed))
        random = np.random.default_rng([seed, candidate.workers, 7])
        rate = self.rate(candidate, cluster, self.shape())
        return self._observed(candidate, target, (rate,), rate, limit_s, limit_samples, random, reaches=True)

    def rate(self, candidate, cluster, shape):
        factors = [cluster.factor(worker) for worker in range(cluster.workers)]
        assert cluster.workers == candidate.workers
        full = shape.batch_size * candidate.workers / (cluster.compute.mean_s + 1e-5)
        return full * self._share(candidate, dict(enumerate(factors)))

    def command(self, candidate, target, *, slow, restarts, samples):
        return f"go {candidate.algorithm} {candidate.workers} {sorted(slow.items())} {restarts}"

    def _share(self, candidate, slow):
        """Lockstep waits for the slowest, others do not."""
        factors = [slow.get(worker, 1.0) for worker in range(candidate.workers)]
        return 1 / max(factors) if candidate.algorithm == "lockstep" else float(np.mean([1 / one for one in factors]))

    def _noise(self, random):
        return math.exp(self.noise * random.standard_normal())

    def _observed(self, candidate, target, rates, rate, limit_s, limit_samples, random, *, reaches):
        most = min(limit_s * rate, limit_samples, self.ends)
        needs = self._noise(random)  # so many times as many samples
        samples = np.arange(self.every, min(most, 3e4) + 1, self.every)
        gaps = self.law(candidate).gap(samples / needs, candidate.workers)
        values = 1 - gaps if target.accuracy is not None else gaps
        wanted = 1 - target.accuracy if target.accuracy is not None else target.loss
        hits = np.flatnonzero(gaps <= wanted)
        at = int(hits[0]) if len(hits) else None
        kept = at + 1 if at is not None and reaches else len(samples)
        curve = tuple(zip((samples / rate).tolist(), samples.tolist(), values.tolist(), strict=True))[:kept]
        ended = float(samples[at]) if at is not None and reaches else most
        return Observed(
            rates=rates,
            curve=curve,
            samples=int(min(ended, 3e4)),
            wall_s=min(ended, 3e4) / rate,
            reached_s=curve[at][0] if at is not None else None,
            reached_samples=curve[at][1] if at is not None else None,
            outcome="converged" if at is not None and reaches else "stopped",
            ended_itself=self.ends < min(limit_s * rate, limit_samples) and at is None,
            setup_s=2.0,
        )
