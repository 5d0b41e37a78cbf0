"""Simulations of candidates: the measured machine, one simulation as a job, and the convergence model of its results."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.advice.answer import Candidate, Target
from paceline.advice.calibration.machine import measure
from paceline.advice.program import Observed, Program, Shape
from paceline.errors import PacelineError, UsageError, first_line
from paceline.planner.convergence_model import ConvergenceModel, Curve
from paceline.simulator import Cluster
from paceline.simulator.compute import Normal
from paceline.tasks.load import BUILT_IN

_ELEMENT_BYTES = 4  # float32
_ROUNDS = 8
_CLOSE = 0.01  # relative difference from the measured rate
_LEAST = 0.02  # lower bound of the compute time, as a share of the first guess
_MOST_DEVIATION = 0.3  # of compute time, over its mean


def this_machine(program: str, shape: Shape, on_progress: Callable[[str], None]) -> tuple[Cluster, list[str]]:
    """Measures memory, locks and messages of this machine in a few seconds; also returns a warning if that failed.

    Short runs measure the step, with all workers at once.
    """
    task, num_bytes = (program, None) if program in BUILT_IN else ("digits-mlp", shape.num_parameters * _ELEMENT_BYTES)

    def tell(what: str) -> None:
        on_progress(f"Measuring {what}")

    try:
        found = measure(task, quick=True, vector_bytes=num_bytes, on_progress=tell).as_cluster()
    except PacelineError as error:
        return Cluster(), [f"Messages and memory have the simulator's defaults, because measuring failed: {error}"]
    # An update's memory traffic was measured with plain SGD; for a small model it is mostly the optimizer's overhead.
    return found if task == program else dataclasses.replace(found, update_vectors=Cluster().update_vectors), []


def with_workers(cluster: Cluster, workers: int, slow: Mapping[int, float]) -> Cluster:
    """The same machines with this number of workers, including those that are slow or idle."""
    links = tuple(one for one in cluster.link_factors if max(one[:2]) < workers)
    idle = tuple(one for one in cluster.idleness if one[0] < workers)
    found = dataclasses.replace(cluster, workers=workers, slowness=(), idleness=idle, link_factors=links)
    for worker, factor in sorted(slow.items()):
        if worker < workers:
            found = found.slow(worker=worker, factor=factor)
    return found


def matched(
    program: Program, candidate: Candidate, cluster: Cluster, shape: Shape, samples_per_s: float, deviation: float
) -> Cluster:
    """The cluster with the compute time at which simulated workers have the measured speed.

    Seconds per sample are nearly linear in the compute time, so the secant method finds it. The result is at least a fiftieth
    of the compute time without overhead.
    """
    spread = min(deviation, _MOST_DEVIATION)

    def at(compute_s: float) -> tuple[Cluster, float]:
        drawn = Normal(average_s=compute_s, deviation_s=spread * compute_s) if spread > 0 else compute_s
        one = dataclasses.replace(cluster, compute_s=drawn)
        return one, 1 / program.rate(candidate, one, shape)

    wanted_s = 1 / samples_per_s  # per sample
    guess_s = candidate.workers * shape.batch_size / samples_per_s
    least_s = _LEAST * guess_s
    compute_s, (found, sample_s) = guess_s, at(guess_s)
    slope = sample_s / compute_s
    for _ in range(_ROUNDS):
        if abs(sample_s / wanted_s - 1) <= _CLOSE:
            break
        next_s = max(least_s, compute_s + (wanted_s - sample_s) / slope)
        if next_s == compute_s:
            break
        before, (found, after_s) = (compute_s, sample_s), at(next_s)
        rise = (after_s - before[1]) / (next_s - before[0])
        slope = rise if rise > 0.05 * slope else slope
        compute_s, sample_s = next_s, after_s
    return found


_FEWEST = 4  # points of a curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One simulation, which ends at the target or at one of the limits."""

    program: Program
    candidate: Candidate
    cluster: Cluster  # with its compute time, if `samples_per_s` is None
    shape: Shape
    target: Target
    limit_s: float
    limit_samples: int
    seed: int
    samples_per_s: float | None = None  # measured speed of all workers together, which the compute time is matched to
    deviation: float = 0.0  # relative standard deviation of a gradient's time


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The result of a job."""

    cluster: Cluster  # with its matched compute time, for further seeds
    run: Observed  # its measurements, in virtual seconds
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
    return Simulated(cluster=cluster, run=run, took_s=time.perf_counter() - began_s)


def fit(arguments: tuple[Target, Sequence[tuple[int, Observed]]]) -> ConvergenceModel | None:
    """Hemingway's model of one algorithm's simulations, in samples; None: too few points.

    Args:
        arguments: the target, and pairs of a number of workers and a simulation.
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
