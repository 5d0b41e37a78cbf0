"""Measurements of several workers as a cluster for the simulator: the file's numbers, its comments, and plain data."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.advice.calibration.codecs import CodecRate, codec_table
from paceline.advice.calibration.fits import (
    CLEARLY_SLOW_LINK,
    CLEARLY_SLOW_WORKER,
    compute_time,
    slow_links,
    slow_workers,
    typical_link,
)
from paceline.advice.calibration.measurements import (
    Link,
    MemoryTimes,
    Quartiles,
    fit_link,
    named_quartiles,
    rounded,
)
from paceline.compression.registry import probed_codecs
from paceline.errors import PacelineError, name_workers
from paceline.simulator import Cluster
from paceline.simulator.compute import ComputeTime, Recorded, compute_registry
from paceline.system.machine import versions


@dataclass(frozen=True)
class MeasuredWorker:
    """One worker's own measurements."""

    machine: int  # 0, 1, ...: shared by workers with the same number
    host: str
    about: dict[str, Any]  # its machine, from `system.machine`
    compute_s: dict[int, Quartiles]  # by batch size, a step without its update
    steps_s: list[float]  # consecutive times of a step of the cluster's batch size, without its update
    update_s: Quartiles  # one plain SGD step of the optimizer
    #: Its machine's, if this worker measured it, as one of each machine does; the same for codecs.
    memory: MemoryTimes | None
    codecs: dict[str, CodecRate] = field(default_factory=dict)
    #: To each worker to which it measured the link, all with higher numbers, by message bytes.
    round_trips_s: dict[int, dict[int, list[float]]] = field(default_factory=dict)

    def spreads(self) -> dict[str, Quartiles]:
        return named_quartiles(self.compute_s, self.update_s, self.memory)

    def checked(self, worker_id: int, machines: list[int]) -> MeasuredWorker:
        """Returns itself if worker `worker_id` can have measured it; `machines` has each worker's machine.

        Raises:
            ValueError: it cannot.
        """
        trips = [pair for by_size in self.round_trips_s.values() for pair in by_size.items()]
        spreads = [*self.compute_s.values(), self.update_s]
        lists: list[list[Any]] = [self.steps_s, *(times_s for _, times_s in trips)]
        if self.memory is not None:
            spreads += [self.memory.copy_s, *self.memory.crowded_copies_s]
            lists.append(self.memory.crowded_copies_s)
        numbers = [*self.compute_s, *self.steps_s, *(size for size, _ in trips)]
        numbers += [one for _, times_s in trips for one in times_s]
        numbers += [one for spread in spreads for one in vars(spread).values()]
        numbers += [one for rate in self.codecs.values() for one in rate]
        is_sound = (
            self.machine == machines[worker_id]
            and all(lists)
            and all(one > 0 for one in numbers)
            and self.codecs.keys() <= set(probed_codecs())
            and all(worker_id < peer < len(machines) for peer in self.round_trips_s)
        )
        if not is_sound:
            raise ValueError("times, sizes or rates that are not above 0, or unknown workers, machines or codecs")
        return self


@dataclass(frozen=True)
class MeasuredCluster:
    """The measurements of all workers."""

    task: str
    batch_size: int  # of the step that the cluster describes
    vector_bytes: int
    workers: list[MeasuredWorker]
    names_hosts: bool = False  # whether file and result name the machines

    @property
    def round_trips_s(self) -> dict[tuple[int, int], dict[int, list[float]]]:
        """By pair of workers, by message bytes; lacks pairs that were not measured."""
        return {(a, b): times_s for a, worker in enumerate(self.workers) for b, times_s in worker.round_trips_s.items()}

    def links(self) -> dict[tuple[int, int], Link]:
        """The links with meaningful measurements; raises PacelineError if there are none."""
        found, why = {}, ""
        for pair, trips_s in self.round_trips_s.items():
            try:
                found[pair] = fit_link(trips_s)
            except PacelineError as error:  # disturbed; no reason to measure a hundred other pairs again
                why = str(error)
        if not found:
            raise PacelineError(why)
        return found

    def as_cluster(self) -> Cluster:
        """The cluster that the measurements describe; unmeasured fields have the simulator's defaults."""
        steps_s = [worker.steps_s for worker in self.workers]
        typical, slowness = slow_workers(steps_s)
        memories = [worker.memory.figures(self.vector_bytes) for worker in self.workers if worker.memory is not None]
        figures = {name: statistics.median(one[name] for one in memories) for name in memories[0]}
        rounded_figures: dict[str, Any] = {name: rounded(value) for name, value in figures.items()}
        vectors = self.workers[typical].update_s.median_s * figures["core_bytes_per_s"] / self.vector_bytes
        links = self.links()
        link = typical_link(links)
        return Cluster(
            workers=len(self.workers),
            compute_s=compute_time(steps_s, typical),
            update_vectors=rounded(vectors),
            latency_s=rounded(link.latency_s),
            bandwidth_bytes_per_s=rounded(link.without_copy(figures["core_bytes_per_s"])),
            slowness=tuple(sorted(slowness.items())),
            codecs=codec_table(self._codecs()),
            link_factors=tuple((*pair, factor) for pair, factor in slow_links(links, self.vector_bytes).items()),
            **rounded_figures,
        )

    def _codecs(self) -> dict[str, CodecRate]:
        measured = [worker.codecs for worker in self.workers if worker.codecs]
        names = set.intersection(*(set(one) for one in measured)) if measured else set()
        return {
            name: CodecRate(*(statistics.median(rates) for rates in zip(*(one[name] for one in measured), strict=True)))
            for name in names
        }

    def summary(self, cluster: Cluster) -> list[str]:
        """The most important results, one line each."""
        compute = cluster.compute_s
        if isinstance(compute, Recorded):
            how = f"a recorded trace of {len(compute.times_s)} steps, {compute.mean_s * 1e3:.3g} ms on average"
        elif isinstance(compute, ComputeTime):
            how = compute_registry.spec(compute)
        else:
            how = f"{compute * 1e3:.3g} ms, nearly always the same"
        lines = [f"step without update, batch {self.batch_size}, the median worker's: {how}"]
        lines += [
            f"worker {worker}: its steps take {factor:.2f} times the median worker's"
            for worker, factor in cluster.slowness
        ]
        lines.append(
            f"links, medians of {len(self.links())} pairs: {cluster.latency_s * 1e6:.3g} us,"
            f" {cluster.bandwidth_bytes_per_s / 1e6:.4g} MB/s"
        )
        message = f"a message of the parameters' {self.vector_bytes:,} bytes"
        lines += [
            f"link {a}-{b}: {message} takes {factor:.2f} times the usual" for a, b, factor in cluster.link_factors
        ]
        return lines

    def comments(self, cluster: Cluster) -> list[str]:
        workers, num_pairs = self.workers, math.comb(len(self.workers), 2)
        lines = [
            f"Measured by `paceline calibrate` with {len(workers)} workers, PyTorch {versions()['torch']}:",
            *(f"  {self._machine(ids)}" for ids in self._by_machine()),
            f"Steps: {self.task} with batches of {self.batch_size}, plain SGD, one thread per worker, all workers at once.",
            f"compute_s: the median worker's. slow: workers that differ from it by more than {CLEARLY_SLOW_WORKER - 1:.0%}.",
            f"Links: {len(self.round_trips_s)} of {num_pairs} pairs, no machine with two at once; medians, without the copy.",
            f"slow_link: links on which {self.vector_bytes:,} bytes take over {CLEARLY_SLOW_LINK - 1:.0%} longer or shorter.",
            "Workers on one machine share its cores and its network here; in the simulator each has its own.",
            "[codecs]: bytes of a float32 vector that one core encodes and decodes per second: medians over machines.",
            "Not measured, but the simulator's defaults: racing_blocks, detection_s.",
        ]
        for ids in self._by_machine():
            if len(ids) > (cores := int(workers[ids[0]].about["cores"])):
                have = "1 core" if cores == 1 else f"{cores} cores"
                lines.append(
                    f"{name_workers(ids).capitalize()} share {have}: their steps include waiting for each other."
                )
        disturbed = sorted(self.round_trips_s.keys() - self.links().keys())
        if disturbed:
            named = ", ".join(f"{a}-{b}" for a, b in disturbed)
            lines.append(f"Too disturbed to mean anything, so taken as usual: links {named}.")
        lines += ["", *self.summary(cluster), "", "What was measured: median, and the middle half."]
        for number, worker in enumerate(workers):
            lines += [f"  worker {number}, {name}: {spread}" for name, spread in worker.spreads().items()]
        return lines

    def _by_machine(self) -> list[list[int]]:
        machines = [worker.machine for worker in self.workers]
        return [[number for number, its in enumerate(machines) if its == one] for one in sorted(set(machines))]

    def _machine(self, ids: list[int]) -> str:
        first = self.workers[ids[0]]
        named = f" ({first.host})" if self.names_hosts else ""
        about = f"{first.about['processor']}, {first.about['cores']} cores, {first.about['system']}"
        return f"{name_workers(ids)} on one machine{named}: {about}; its memory by worker {ids[0]}"

    def as_json(self, cluster: Cluster, out: Path) -> dict[str, Any]:
        links = self.links()
        return {
            "file": str(out),
            "task": self.task,
            "batch_size": self.batch_size,
            "cluster": cluster.as_table(),
            "workers": [
                {
                    "worker": number,
                    "machine": worker.machine,
                    **({"host": worker.host} if self.names_hosts else {}),
                    "about": worker.about,
                    "measured": {name: asdict(spread) for name, spread in worker.spreads().items()},
                    "codecs": {name: rate._asdict() for name, rate in worker.codecs.items()},
                }
                for number, worker in enumerate(self.workers)
            ],
            "links": [
                {
                    "workers": list(pair),
                    "latency_s": links[pair].latency_s if pair in links else None,
                    "bandwidth_bytes_per_s": links[pair].bandwidth_bytes_per_s if pair in links else None,
                    "round_trips": {str(size): asdict(Quartiles.of(times_s)) for size, times_s in trips_s.items()},
                }
                for pair, trips_s in sorted(self.round_trips_s.items())
            ],
            "versions": versions(),
        }
