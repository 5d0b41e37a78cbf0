"""What would make a recorded run faster, simulated with the speeds in its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from paceline.algorithms import ADPSGD, DPSGD, Algorithm, AllReduce, LocalSGD, Lockstep, ParameterServer, registry
from paceline.algorithms.server.modes import Async, Mode, Sync
from paceline.errors import PacelineError
from paceline.observe.blame import Blame, Cause
from paceline.observe.waits import COMPUTING, INPUT, LOOP, steps_of
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.simulate_task import simulate_task
from paceline.simulator import Cluster

_STEPS = 120  # of each simulated worker
_MOST_WORKERS = 64
_WORTH = 0.95  # of the time
_PERIOD = 8
_ELEMENT_BYTES = 4
_NO_BYTES_PER_S = 1e12  # as good as no transfer


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change, and the time per sample that it would take relative to the run's; None: it is not simulated.

    Args:
        spec: another algorithm; "": batches fetched in the background.
    """

    spec: str
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
    """The best remedy for what slowed a run down; None: none is known, or none helps in the simulation.

    It says nothing about the loss per sample, which another algorithm can change.
    """
    cause, algorithm = found.cause, registry.build(run.result["algorithm"])
    if cause is None:
        return None
    specs = [""] if cause.activity == "input" else [registry.spec(one) for one in _instead(algorithm, cause, found)]
    is_of_server = cause.activity == "communicating" and cause.worker is not None  # no cluster has such links
    if specs and (is_of_server or len(run.records) > _MOST_WORKERS):
        return Remedy(spec=specs[0], relative_time=None)
    cluster, times = _cluster(run, cause, algorithm), {}
    for spec in specs:
        with suppress(PacelineError):
            now = _samples_per_s(run, registry.spec(algorithm), cluster)
            then = _samples_per_s(run, spec or registry.spec(algorithm), cluster if spec else _prefetched(cluster))
            times[spec] = now / then
    best = min(times, key=lambda spec: times[spec], default=None)
    return Remedy(spec=best, relative_time=times[best]) if best is not None and times[best] < _WORTH else None


def _instead(algorithm: Algorithm, cause: Cause, found: Blame) -> Iterator[Algorithm]:
    """Algorithms that wait less for what was slow."""
    if found.is_free or cause.activity not in ("computing", "communicating"):
        return
    if isinstance(algorithm, ParameterServer):
        mode: Mode = Async()
        if isinstance(algorithm.mode, Sync) and algorithm.mode.backups != "auto" and cause.worker is not None:
            more = algorithm.mode.backups + 1
            mode = dataclasses.replace(algorithm.mode, backups=more) if more < len(found.shares) - 1 else mode
        yield dataclasses.replace(algorithm, mode=mode)
    elif cause.activity == "communicating" and isinstance(algorithm, AllReduce | Lockstep):
        yield LocalSGD(period=_PERIOD)
    elif cause.activity == "communicating" and not isinstance(algorithm, DPSGD):
        yield dataclasses.replace(algorithm, period=4 * algorithm.period)  # pyright: ignore
    else:
        with suppress(PacelineError):  # equal shares with a codec, for example
            if isinstance(algorithm, AllReduce | Lockstep) and not algorithm.by_speed:
                yield dataclasses.replace(algorithm, shares="auto")
                return
        yield ADPSGD()


def _cluster(run: RunData, cause: Cause, algorithm: Algorithm) -> Cluster:
    """The run's workers: their gradients, their input and own code as sleep, and links of the measured speed."""
    steps = steps_of(run.records)
    workers = np.unique(steps.worker).tolist()  # of this machine, if they have joined from several
    times_s = [np.median(steps.took_s[steps.worker == one], axis=0) for one in workers]
    if cause.worker is not None and cause.activity in ("computing", "input"):
        slow = COMPUTING if cause.activity == "computing" else INPUT
        times_s[workers.index(cause.worker)][slow] = cause.own_s
    least_s = max(1e-6, min(float(own[COMPUTING]) for own in times_s))
    cluster = Cluster(workers=len(times_s), compute_s=least_s, latency_s=0.0, bandwidth_bytes_per_s=_NO_BYTES_PER_S)
    if cause.activity == "communicating":
        num_bytes = _ELEMENT_BYTES * (run.result.get("num_parameters") or 1)
        around = 2 * (cluster.workers - 1) / cluster.workers if algorithm.needs.collectives else 1.0
        rate = max(1.0, min(_NO_BYTES_PER_S, around * num_bytes / (cause.others_s or cause.own_s)))
        cluster = dataclasses.replace(cluster, bandwidth_bytes_per_s=rate, collective="ring")
        if cause.link is not None and cause.others_s and {*cause.link} <= {*workers}:
            one, two = map(workers.index, cause.link)
            cluster = cluster.slow_link(one, two, max(1.0, cause.own_s / cause.others_s))
    for place, own in enumerate(times_s):
        cluster = cluster.slow(worker=place, factor=max(1.0, own[COMPUTING] / least_s))
        cluster = cluster.idle(worker=place, idle_s=own[INPUT] + own[LOOP])
    return cluster


def _prefetched(cluster: Cluster) -> Cluster:
    """The cluster whose workers wait only for the part of their input that takes longer than a gradient."""
    hidden = [(place, cluster.factor(place) * cluster.compute.mean_s) for place in range(cluster.workers)]
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
