"""What would make a recorded run faster, simulated with the speeds in its records."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from paceline.algorithms import Algorithm, parse, registry
from paceline.errors import PacelineError
from paceline.observe.blame import Blame, Cause
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.measured_cluster import measured_cluster
from paceline.run.simulate_task import simulate_task
from paceline.simulator import Cluster

_STEPS = 120  # of each simulated worker
_MOST_WORKERS = 64
_WORTH = 0.95  # of the time


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change to the run, and its time per sample relative to the run's; None: it was not simulated."""

    spec: str  # another algorithm; "": batches fetched in the background
    relative_time: float | None

    def __str__(self) -> str:
        what = (
            f"`{self.spec}`"
            if self.spec
            else "A DataLoader with num_workers=2, which fetches while the worker computes,"
        )
        if self.relative_time is None:
            return f"{what} would wait less."
        return f"{what} would take {self.relative_time:.2f} of the time per sample (simulated)."


def remedy(run: RunData, found: Blame) -> Remedy | None:
    """A remedy for what slowed a run down; None: none is known, or it does not help in the simulation.

    It says nothing about the loss per sample, which another algorithm can change.
    """
    cause, algorithm = found.cause, registry.build(run.result["algorithm"])
    spec = _instead(algorithm, cause, found) if cause is not None else None
    if cause is None or spec is None:
        return None
    is_of_server = cause.activity == "communicating" and cause.worker is not None  # no cluster has such links
    if is_of_server or len(run.records) > _MOST_WORKERS:
        return Remedy(spec=spec, relative_time=None)
    own = registry.spec(algorithm)
    with suppress(PacelineError):
        cluster = measured_cluster(run, slice(cause.since_step - 1, cause.until_step))
        then = _samples_per_s(run, spec or own, cluster if spec else _prefetched(cluster))
        if (relative_time := _samples_per_s(run, own, cluster) / then) < _WORTH:
            return Remedy(spec=spec, relative_time=relative_time)
    return None


def _instead(algorithm: Algorithm, cause: Cause, found: Blame) -> str | None:
    """As `Remedy.spec`; None: there is none."""
    if cause.activity == "input":
        return ""
    if found.is_free or cause.activity not in ("computing", "communicating"):
        return None
    other = algorithm.waiting_less("worker" if cause.worker is not None else "network", len(found.shares))
    return registry.spec(parse(other) if isinstance(other, str) else other) if other is not None else None


def _prefetched(cluster: Cluster) -> Cluster:
    """The cluster whose workers wait only for the part of their input that takes longer than a gradient."""
    hidden = [(place, cluster.compute_of(place).mean_s) for place in range(cluster.workers)]
    idle_s = tuple((place, max(0.0, cluster.idle_of(place) - least_s)) for place, least_s in hidden)
    return dataclasses.replace(cluster, idleness=idle_s)


def _samples_per_s(run: RunData, spec: str, cluster: Cluster) -> float:
    """Of all workers, in the second half of the time in which all of them train."""
    samples = np.concatenate([own["samples"] for own in run.records.values()])
    size = max(1, int(np.median(samples[samples > 0])))
    config = TrainConfig(algorithm=spec, workers=cluster.workers, steps=_STEPS, batch_size=size)
    parameters = run.result.get("num_parameters") or 1
    simulated = simulate_task(config, cluster=cluster, timing_only=True, num_parameters=parameters)
    until_s = min(float(own["ended_s"].max()) for own in simulated.records.values() if len(own))
    rows = np.concatenate(list(simulated.records.values()))
    counted = (rows["ended_s"] > until_s / 2) & (rows["ended_s"] <= until_s) & (rows["applied_version"] >= 1)
    return float(rows["samples"][counted].sum()) / (until_s / 2)
