"""Programs that advice can run and simulate, and the measurements of their runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from paceline.advice.answer import Candidate, Target
from paceline.planner.convergence_model import thinned
from paceline.planner.estimate import Estimate, deviations
from paceline.records.run_data import RunData
from paceline.records.summary import WINDOW, applied_in_order, loss_curve
from paceline.simulator import Cluster

_WINDOWS = 8  # of a run, for batch means
_WARM_UP = 0.2  # share of a run that does not count, at least
_MOST_POINTS = 200  # of a curve of losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that determine a step's time in a simulation."""

    num_parameters: int
    batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The measurements of one run, real or simulated."""

    #: Samples per second of all workers, in consecutive equal parts of the steady state; one entry if it is exact.
    rates: tuple[float, ...] = ()
    curve: tuple[tuple[float, float, float], ...] = ()  # seconds, samples and loss or accuracy, in order of time
    samples: int = 0  # of all applied gradients
    wall_s: float = 0.0  # of training; virtual seconds in a simulation
    reached_s: float | None = None  # when the target was reached; None: it was not
    reached_samples: float | None = None  # samples until then
    outcome: str
    reason: str = ""  # of the outcome, if it needs one
    ended_itself: bool = False  # whether the program ended by itself, as it would in a longer run
    staleness: float | None = None  # mean; None: the algorithm has none
    compute_deviation: float = 0.0  # standard deviation of a gradient's time over its mean, without outliers
    setup_s: float = 0.0

    def stretched(self, factor: float) -> Observed:
        """The same run on a machine that is slower by this factor."""
        return replace(
            self,
            rates=tuple(rate / factor for rate in self.rates),
            curve=tuple((time_s * factor, samples, value) for time_s, samples, value in self.curve),
            wall_s=self.wall_s * factor,
            reached_s=None if self.reached_s is None else self.reached_s * factor,
        )


class Program(Protocol):
    """A training program to give advice on; `programs.py` has built-in tasks and users' loops."""

    @property
    def name(self) -> str:
        """As the user named it."""
        ...

    def run(
        self, candidate: Candidate, target: Target, *, for_s: float, seed: int, slow: Mapping[int, float]
    ) -> Observed:
        """Trains with real workers on this machine, for this many seconds or until the target."""
        ...

    def shape(self) -> Shape:
        """Size of model and batch, without a real run."""
        ...

    def simulate(
        self, candidate: Candidate, cluster: Cluster, target: Target, *, limit_s: float, limit_samples: int, seed: int
    ) -> Observed:
        """Trains with simulated workers and real gradients, to the target or to one of the limits."""
        ...

    def rate(self, candidate: Candidate, cluster: Cluster, shape: Shape) -> float:
        """Samples per virtual second of all workers, without computing gradients."""
        ...

    def command(
        self, candidate: Candidate, target: Target, *, slow: Mapping[int, float], restarts: int, samples: float
    ) -> str:
        """The command that starts this candidate; `samples` is the largest number that it is expected to need."""
        ...


def steady_rates(run: RunData, *, gossip: bool) -> tuple[float, ...]:
    """Samples per second of all workers in 8 consecutive parts of equal length, after every worker's first gradient.

    Empty if fewer than 16 gradients remain.
    """
    applied = applied_in_order(run.records, gossip=gossip)
    if not len(applied):
        return ()
    ended_s, samples = applied["ended_s"], applied["samples"]
    end_s = float(ended_s.max())
    firsts = [float(rows["ended_s"].min()) for rows in run.records.values() if len(rows)]
    begin_s = max(_WARM_UP * end_s, min(max(firsts), 0.5 * end_s))
    if (ended_s > begin_s).sum() < 2 * _WINDOWS:
        return ()
    counted, edges = np.histogram(ended_s, bins=_WINDOWS, range=(begin_s, end_s), weights=samples)
    return tuple((counted / np.diff(edges)).tolist())


def mean_rate(rates: tuple[float, ...]) -> Estimate:
    """The mean of consecutive parts' rates with its interval, by batch means; exact if there is only one part."""
    mean = float(np.mean(rates))
    if len(rates) < 2:
        return Estimate(value=mean, low=mean, high=mean)
    error = float(np.std(rates, ddof=1)) / math.sqrt(len(rates))
    half = deviations(len(rates) - 1) * error
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def observed(run: RunData, target: Target, *, real: bool, setup_s: float = 0.0) -> Observed:
    """What a run's records and evaluations show about a target."""
    gossip = bool(run.result.get("gossip"))
    records = {worker: rows for worker, rows in run.records.items() if len(rows)}
    rows = np.concatenate(list(records.values())) if records else None
    above = target.accuracy is not None
    curve = _curve(run, above=above, gossip=gossip)
    wanted = target.accuracy if above else target.loss
    hits = [one for one in curve if wanted is not None and ((one[2] >= wanted) if above else (one[2] <= wanted))]
    wall_s, samples = float(run.result.get("wall_s") or 0.0), int(run.result.get("samples") or 0)
    computing_s = rows["gradient_ended_s"] - rows["gradient_started_s"] if rows is not None else np.empty(0)
    outcome = run.result.get("outcome", "stopped")
    exact = (samples / wall_s,) if wall_s > 0 else ()
    return Observed(
        rates=steady_rates(run, gossip=gossip) if real else exact,
        curve=tuple(curve[at] for at in thinned(len(curve), _MOST_POINTS).tolist()),
        samples=samples,
        wall_s=wall_s,
        reached_s=hits[0][0] if hits else None,
        reached_samples=hits[0][1] if hits else None,
        outcome=outcome if outcome != "stopped" or not hits else "converged",
        reason=run.result.get("outcome_reason") or "",
        staleness=(run.result.get("staleness") or {}).get("mean"),
        compute_deviation=_deviation(computing_s),
        setup_s=max(0.0, setup_s - wall_s),
    )


def _curve(run: RunData, *, above: bool, gossip: bool) -> list[tuple[float, float, float]]:
    """Rows of seconds, samples and accuracy, or, for a target loss, the running loss once its window is full."""
    if above:
        rows = [one for one in run.evaluations if one.get("test_accuracy") is not None]
        return sorted((float(one["elapsed_s"]), float(one["samples"]), float(one["test_accuracy"])) for one in rows)
    curve = loss_curve(run.records, gossip=gossip)
    columns = (curve.time_s, curve.samples, curve.average)
    return list(zip(*(column[WINDOW - 1 :].tolist() for column in columns), strict=True))


def _deviation(times_s: np.ndarray) -> float:
    """Standard deviation over the mean, from the interquartile range, which is robust to outliers."""
    if len(times_s) < 8:
        return 0.0
    low, median, high = np.percentile(times_s, [25, 50, 75])
    return float((high - low) / 1.349 / median) if median > 0 else 0.0
