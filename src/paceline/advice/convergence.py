"""How many samples each candidate needs: simulations with real gradients, and Hemingway's model beyond them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advice.answer import Candidate, Target
from paceline.advice.machine import matched
from paceline.advice.program import Observed, Program, Shape
from paceline.errors import PacelineError, UsageError, first_line
from paceline.planner.convergence_model import ConvergenceModel, Curve
from paceline.simulator import Cluster

_FEWEST = 4  # points of a curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One simulation, which ends at the target or at one of the limits.

    Args:
        cluster: with its compute time, if `samples_per_s` is None; without slow workers, if they are not in that figure.
        samples_per_s: that all workers together are to have.
        deviation: of a gradient's seconds over their mean.
    """

    program: Program
    candidate: Candidate
    cluster: Cluster
    shape: Shape
    target: Target
    limit_s: float
    limit_samples: int
    seed: int
    samples_per_s: float | None = None
    deviation: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The result of a job.

    Args:
        cluster: that it ran on, for further seeds.
        run: its measurements, in virtual seconds.
    """

    cluster: Cluster
    run: Observed
    took_s: float


def simulate(job: Job) -> Simulated:
    """Run a job; an error of the program is the outcome "crashed"."""
    cluster, began_s = job.cluster, time.perf_counter()
    try:
        if job.samples_per_s is not None:
            cluster = matched(job.program, job.candidate, cluster, job.shape, job.samples_per_s, job.deviation)
        began_s = time.perf_counter()
        run = job.program.simulate(
            job.candidate,
            cluster,
            job.target,
            limit_s=job.limit_s,
            limit_samples=job.limit_samples,
            seed=job.seed,
        )
    except PacelineError as error:
        run = Observed(outcome="crashed", reason=first_line(error))
    return Simulated(
        cluster=cluster,
        run=run,
        took_s=time.perf_counter() - began_s,
    )


def fit(arguments: tuple[Target, Sequence[tuple[int, Observed]]]) -> ConvergenceModel | None:
    """Hemingway's model of one algorithm's simulations, in samples; None: they show too little.

    Args:
        arguments: the target, and pairs of a number of workers and what was simulated with it.
    """
    target, runs = arguments
    curves = []
    for workers, run in runs:
        points = [
            (samples, target.gap(value)) for _, samples, value in run.curve if samples >= 1 and math.isfinite(value)
        ]
        i, first = np.unique(np.array([samples for samples, _ in points]), return_index=True)
        if len(i) >= _FEWEST:
            curves.append(Curve(workers=workers, iterations=i, losses=np.array([points[at][1] for at in first])))
    if not curves:
        return None
    try:
        return ConvergenceModel.fit(curves, lower_bound=0.0)
    except UsageError:
        return None
