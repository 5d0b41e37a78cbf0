"""The workers, links and deaths of a recorded run, as the cluster and the faults of a simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.algorithms import registry
from paceline.errors import UsageError
from paceline.observe.blame import slow_link
from paceline.observe.waits import COMPUTING, INPUT, LOOP, Steps, is_divided, waits_of
from paceline.records.run_data import RunData
from paceline.run.config import TrainConfig
from paceline.run.replayable import since_resumed
from paceline.run.simulate_task import simulate_task
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Faults

_MOST_STEPS = 10_000  # of a worker's trace
_LEAST_S = 1e-7
_FREE_BYTES_PER_S = 1e14
_TRIED_STEPS = 20_000  # of all workers together, in one simulation
_MOST_TRIES = 8  # to find a rate
_CLOSE = 0.005  # relative


class RecordedConditions(NamedTuple):
    """What a simulation takes from a recorded run.

    Attributes:
        faults: the deaths.
        restarts: how many of the dead were replaced.
    """

    cluster: Cluster
    faults: Faults
    restarts: int


def recorded_conditions(run: RunData | Path | str) -> RecordedConditions:
    """Reads the speeds, links and deaths of a run.

    Raises:
        UsageError: the run lacks steps of a worker, or other records that a simulation needs.
    """
    name = "The run" if isinstance(run, RunData) else str(run)
    run = run if isinstance(run, RunData) else RunData.load(run)
    if not run.result.get("algorithm") or not any(map(len, run.records.values())):
        raise UsageError(f"{name} has no result or no events: name a run that has ended, or resume this one first.")
    if not isinstance(run.result["algorithm"], str) or not isinstance(run.result.get("workers_lost", []), list):
        raise UsageError(f"{name} is damaged: algorithm or workers_lost in its result.json has an invalid value.")
    if is_divided(run):
        raise UsageError(f"{name} has a layout or a plan, which simulations do not support: name a run without one.")
    run = since_resumed(run)
    num_workers = max(run.config.get("workers") or 0, 1 + max(run.records))
    for worker in range(num_workers):
        if worker not in run.records or not (run.records[worker]["samples"] > 0).any():
            raise UsageError(f"{name} has no gradients of worker {worker}, so its speed is unknown: name another run.")
    faults, away_s = _deaths(run)
    cluster = measured_cluster(run)
    if away_s:
        restart_s = max(0.0, float(np.median(away_s)) - cluster.detection_s)
        cluster = dataclasses.replace(cluster, restart_s=restart_s)
    return RecordedConditions(cluster, faults, len(away_s))


def _deaths(run: RunData) -> tuple[Faults, list[float]]:
    """Each worker dies half a step after its last record; how long each replaced one was away."""
    faults, away_s = Faults(), []
    lost: list[int] = run.result.get("workers_lost") or []
    begun_s = min(float(rows["started_s"][0]) for rows in run.records.values())  # a resumed run's times go on
    for worker, rows in run.records.items():
        last = int(rows["incarnation"].max())
        for incarnation in range(last + (lost.count(worker) > last)):
            own, later = (rows[rows["incarnation"] == one] for one in (incarnation, incarnation + 1))
            if not len(own) or (incarnation < last and not len(later)):
                raise UsageError(f"Worker {worker} of this run died before its first recorded step: name another run.")
            died_s = float(own["ended_s"][-1] + np.median(own["ended_s"] - own["started_s"]) / 2)
            faults = faults.kill(worker=worker, at_s=died_s - begun_s)
            if incarnation < last:
                away_s.append(max(0.0, float(later["started_s"][0]) - died_s))
    return faults, away_s


def measured_cluster(run: RunData, counted: slice = slice(None)) -> Cluster:
    """The cluster of a run that has steps.

    Each worker's gradients take their recorded times, in their order. Its input and its own code between steps are sleep, of
    their median time. At the rates of links and memory, a simulation of the run waits and updates as long as the run did.

    Costs: up to 16 short simulations without gradients, some seconds in all.

    Args:
        run: with `waits_for` in its result.
        counted: which of each worker's steps count.
    """
    found = waits_of(run)
    assert found is not None
    steps, waits_s = found[0], _waits_s(run, found)
    workers = np.unique(steps.worker).tolist()
    has_gradient = [np.flatnonzero((steps.worker == one) & (steps.rows["samples"] > 0)) for one in workers]
    own = [places[counted] if len(places[counted]) else places for places in has_gradient]
    full = _full_batch(run)
    traces = tuple((place, _computing_s(steps, places, full)) for place, places in enumerate(own) if len(places))
    idle_s = [float(_medians_s(steps, places)[[INPUT, LOOP]].sum()) for places in own]
    goes_on = run.result.get("workers_lost") and run.result.get("outcome") != "crashed"
    survivors_continue = registry.build(run.result["algorithm"]).survivors_continue
    cluster = Cluster(
        workers=len(workers), compute_s=float(np.median(np.concatenate([times_s for _, times_s in traces]))),
        traces=traces, idleness=tuple(enumerate(idle_s)), latency_s=0.0,
        collective="memory" if survivors_continue and goes_on else "ring",
    )  # fmt: skip
    taken = np.concatenate(own)
    is_taken = np.isin(np.arange(len(waits_s)), taken)
    link = slow_link(steps, np.where(is_taken, waits_s, 0))
    if link is not None and link.link is not None and link.others_s:
        one, two = map(workers.index, link.link)
        cluster = cluster.slow_link(one, two, link.own_s / link.others_s)
    return _with_rates(cluster, run, _exchange(steps, waits_s, is_taken))


def _full_batch(run: RunData) -> int:
    """Samples of the first batches: later ones can be shorter, or have sizes by the workers' speeds."""
    return max(
        (int(rows["samples"][rows["samples"] > 0][0]) for rows in run.records.values() if rows["samples"].any()),
        default=1,
    )


def _medians_s(steps: Steps, places: np.ndarray) -> np.ndarray:
    """By activity; a process's first step does not count: it includes one-time initialisation."""
    warm = places[steps.rows["step"][places] > 1]
    return np.median(steps.took_s[warm if len(warm) else places], axis=0)


def _computing_s(steps: Steps, places: np.ndarray, full: int) -> tuple[float, ...]:
    """A worker's trace, as for batches of `full` samples: shorter ones take less in the simulation too."""
    places = places[:_MOST_STEPS]
    is_warm, typical_s = steps.rows["step"][places] > 1, _medians_s(steps, places)[COMPUTING]
    times_s = np.where(is_warm, steps.took_s[places, COMPUTING], typical_s) * full / steps.rows["samples"][places]
    return tuple(np.maximum(times_s, _LEAST_S).tolist())


def _waits_s(run: RunData, found: tuple[Steps, np.ndarray, np.ndarray]) -> np.ndarray:
    """For each step, how long it waited for messages, locks or copies, and not for another worker to arrive."""
    steps, blocker, since_s = found
    waits_s = steps.released_s - np.where(blocker >= 0, np.maximum(since_s, steps.arrived_s), steps.arrived_s)
    if run.result["waits_for"] == "neighbours":
        return np.minimum(waits_s, steps.rows["partner_s"])
    exchanges_in_pairs = run.result["waits_for"] == "none" and run.result.get("gossip")
    return steps.rows["partner_s"] if exchanges_in_pairs else waits_s


def _exchange(steps: Steps, waits_s: np.ndarray, is_taken: np.ndarray | bool = True) -> tuple[float, float]:
    """Median times of the steps that have any: of messages, and of updates in the worker's own memory."""
    is_warm = is_taken & (steps.rows["step"] > 1)
    return _median_s(waits_s[is_warm]), _median_s(steps.rows["apply_s"][is_warm])


def _median_s(times_s: np.ndarray) -> float:
    times_s = times_s[times_s > _LEAST_S]
    return float(np.median(times_s)) if len(times_s) else 0.0


def _with_rates(cluster: Cluster, run: RunData, wanted_s: tuple[float, float]) -> Cluster:
    num_steps = min(max(map(len, run.records.values())), max(1, _TRIED_STEPS // cluster.workers))
    spec, size = run.result["algorithm"], _full_batch(run)
    config = TrainConfig(algorithm=spec, workers=cluster.workers, steps=num_steps, batch_size=size)

    def times_s(cluster: Cluster) -> tuple[float, float]:
        parameters = run.result.get("num_parameters") or 1
        tried = simulate_task(config, cluster=cluster, timing_only=True, num_parameters=parameters)
        found = waits_of(tried)
        assert found is not None
        return _exchange(found[0], _waits_s(tried, found))

    if cluster.collective == "memory":
        return _with_rate(cluster, "core_bytes_per_s", sum(wanted_s), lambda one: sum(times_s(one)))
    messages_s, memory_s = wanted_s
    cluster = _with_rate(cluster, "core_bytes_per_s", memory_s, lambda one: times_s(one)[1])
    if not messages_s:
        return dataclasses.replace(cluster, bandwidth_bytes_per_s=_FREE_BYTES_PER_S)
    return _with_rate(cluster, "bandwidth_bytes_per_s", messages_s, lambda one: times_s(one)[0])


def _with_rate(cluster: Cluster, field: str, wanted_s: float, takes_s: Callable[[Cluster], float]) -> Cluster:
    """The cluster with the rate at which something takes as long as it did; unchanged if it does not take time."""
    low, high = 1.0, _FREE_BYTES_PER_S
    for _ in range(_MOST_TRIES if wanted_s else 0):
        took_s, rate = takes_s(cluster), getattr(cluster, field)
        if not took_s or abs(took_s / wanted_s - 1) < _CLOSE:
            break
        low, high = (rate, high) if took_s > wanted_s else (low, rate)
        guess = rate * took_s / wanted_s
        cluster = dataclasses.replace(cluster, **{field: guess if low < guess < high else math.sqrt(low * high)})
    return cluster
