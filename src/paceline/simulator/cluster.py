"""The simulated hardware: workers, their compute speed, and the memory or network that connects them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.errors import UsageError, shown
from paceline.simulator.cluster_file import ClusterFile
from paceline.simulator.compute import ComputeTime, Constant, Trace
from paceline.simulator.hardware.sockets import Sockets
from paceline.specs.bounds import (
    BLOCKS,
    BYTES_PER_S,
    FACTOR,
    FACTOR_FROM_1,
    PROCESSORS,
    SECONDS,
    SECONDS_ABOVE_0,
    SIMULATED_WORKERS,
    UPDATE_VECTORS,
)  # fmt: skip
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterFile):
    """Simulated workers. The default is a plausible server of the 2020s, not a measured one.

    Algorithms on shared memory (`hogwild`, `locked`, `leashed`, `lockstep`) run all workers on one machine with one memory
    bus. All others have a machine and a NIC per worker, and a network between them. With `cores`, all workers run on one
    machine and send messages through its memory, like `paceline train` on one machine.

    Sources of the defaults: one core keeps 10 to 16 cache lines of 64 bytes in flight at 70 to 90 ns each, 7 to 15
    GB/s, hence 10 GB/s; eight channels of DDR4-3200 peak at 205 GB/s, of which about half is sustained when all cores
    copy; an atomic on a line that another core holds takes one transfer between caches, 50 to 150 ns; a futex wake takes
    about 5 us until the woken thread runs. Between machines: a NIC of 10 Gbit/s, 1.25 GB/s each way; 50 us from one
    program to another through two kernels and a switch; a switch that forwards at the full rate of all its ports; two
    missed heartbeats of half a second. Set your own values where absolute times matter.

    `docs/simulated_traffic.md` lists which vectors each algorithm moves and is charged for.

    >>> Cluster(workers=16).slow(worker=0, factor=100).factor(0)
    100.0

    Args:
        workers: the number of workers, at least 1.
        compute_s: forward and backward of one full batch: seconds, or a model such as `Normal(average_s=0.01,
            deviation_s=0.001)`. A shorter batch takes proportionally less. `simulator/overlap.py` says when during it a
            gradient's buckets are complete.
        core_bytes_per_s: memory traffic, reads plus writes, of one worker alone.
        bus_bytes_per_s: traffic of all workers together, shared equally by those that copy at the same time. With `sockets`:
            of each socket's memory.
        update_vectors: vectors that one update moves: parameters read and written, gradient read; 5 with momentum.
        atomic_s: one atomic operation on a contended word, and one attempt to take a lock.
        wake_s: from the release of a lock or the last arrival at a barrier until a waiter runs.
        racing_blocks: pieces in which an update of a racing vector is written, and a copy of it is read.
        latency_s: from the moment the last byte leaves one machine until it arrives at another.
        bandwidth_bytes_per_s: of each worker's NIC, in each direction; concurrent messages share it.
        switch_bytes_per_s: of all messages together; None: unlimited.
        collective: the all-reduce: "ring" or "tree" over the network, "memory" on one machine. None: "memory" for
            `lockstep`, "ring" for all others.
        detection_s: from a worker's death, silence or loss of connection until the others know.
        restart_s: from then until a killed worker's replacement starts, if there are restarts; a new Python process that
            imports PyTorch takes some 2 to 10 s.
        slowness: pairs of worker and factor on its compute time; see `slow`.
        traces: pairs of worker and its own compute times instead of `compute_s`, one for each step; then they repeat.
        cores: of the one machine that all workers, servers included, run on. Workers that compute, move vectors or handle
            messages share them; workers that wait or sleep need none. None: a core for each worker.
        slice_s: with `cores`: how long a worker computes before it yields to others that wait for a core.
        crowding: with `cores`: the factor on compute time while all of them compute.
        spin_s: with a core for each worker: a wait for a lock or at a barrier that is shorter than this ends at once,
            without `wake_s`.
        cold_s: with `cores`: the extra compute time after a long sleep or wait, which leaves caches and clock cold.
        cold_factor: the factor on compute time until that extra time is used up.
        cooling_s: a sleep or wait of t seconds costs 1 - exp(-t / cooling_s) of `cold_s`.
        idle_s: sleep in every step before its forward and backward; it needs no core.
        idleness: pairs of worker and its own `idle_s`; see `idle`.
        link_factors: triples of two workers and a factor on the time of messages between them; see `slow_link`.
        codecs: triples of a codec's name and the bytes of a float32 vector that one core encodes and decodes per second, as
            `paceline calibrate` measures them. Other codecs use their own constants.
        sockets: of the one machine whose memory the workers share; None: one memory, and a core for each worker.
    """

    workers: Annotated[int, SIMULATED_WORKERS] = 2
    compute_s: Annotated[float, SECONDS_ABOVE_0] | ComputeTime = 0.01
    core_bytes_per_s: Annotated[float, BYTES_PER_S] = 10e9
    bus_bytes_per_s: Annotated[float, BYTES_PER_S] = 100e9
    update_vectors: Annotated[float, UPDATE_VECTORS] = 3.0
    atomic_s: Annotated[float, SECONDS_ABOVE_0] = 100e-9
    wake_s: Annotated[float, SECONDS] = 5e-6
    racing_blocks: Annotated[int, BLOCKS] = 4
    latency_s: Annotated[float, SECONDS] = 50e-6
    bandwidth_bytes_per_s: Annotated[float, BYTES_PER_S] = 1.25e9
    switch_bytes_per_s: Annotated[float, BYTES_PER_S] | None = None
    collective: Literal["memory", "ring", "tree"] | None = None
    detection_s: Annotated[float, SECONDS] = 1.0
    restart_s: Annotated[float, SECONDS] = 5.0
    slowness: tuple[tuple[int, float], ...] = ()
    traces: tuple[tuple[int, tuple[float, ...]], ...] = ()
    cores: Annotated[int, PROCESSORS] | None = None
    slice_s: Annotated[float, SECONDS_ABOVE_0] = 0.003
    crowding: Annotated[float, FACTOR_FROM_1] = 1.0
    spin_s: Annotated[float, SECONDS] = 0.0
    cold_s: Annotated[float, SECONDS] = 0.0
    cold_factor: Annotated[float, FACTOR_FROM_1] = 2.0
    cooling_s: Annotated[float, SECONDS_ABOVE_0] = 0.003
    idle_s: Annotated[float, SECONDS] = 0.0
    idleness: tuple[tuple[int, float], ...] = ()
    link_factors: tuple[tuple[int, int, float], ...] = ()
    codecs: tuple[tuple[str, float, float], ...] = ()
    sockets: Sockets | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cores is not None and self.sockets is not None:
            raise UsageError(
                "A cluster has either cores, which all workers share, or sockets, which have their own cores: give "
                "one of them."
            )
        if self.sockets is not None and self.sockets.gradient_bytes > 1.000001 * (
            room := self.compute.mean_s * self.core_bytes_per_s
        ):
            raise UsageError(
                f"sockets.gradient_bytes is {self.sockets.gradient_bytes:g}, but one core moves only {room:g} bytes "
                "in compute_s."
            )
        for worker, factor in self.slowness:
            FACTOR.check(f"The slowness of worker {shown(worker)}", factor)
            self._check_worker(worker, "slow")
        for worker, times_s in self.traces:
            self._check_worker(worker, "given compute times")
            Trace(times_s=times_s)
        for worker, idle_s in self.idleness:
            SECONDS.check(f"The idle time of worker {shown(worker)}", idle_s)
            self._check_worker(worker, "idle")
        for a, b, factor in self.link_factors:
            FACTOR.check(f"The slowness of link {shown(a)}-{shown(b)}", factor)
            if a == b or not (0 <= a < self.workers and 0 <= b < self.workers):
                raise UsageError(
                    f"Link {a}-{b} cannot be slow: a link joins two of the workers from 0 to {self.workers - 1}."
                )

        for name, *rates in self.codecs:
            from paceline.compression.registry import check_probed  # which needs PyTorch

            check_probed(name)
            for rate, what in zip(rates, ("codes", "decodes"), strict=True):
                BYTES_PER_S.check(f"What {name} {what} in a second", rate)

    def _check_worker(self, worker: int, what: str) -> None:
        if not 0 <= worker < self.workers:
            raise UsageError(
                f"Worker {worker} cannot be {what}: the {self.workers} workers are numbered from 0 to "
                f"{self.workers - 1}."
            )

    @property
    def compute(self) -> ComputeTime:
        return self.compute_s if isinstance(self.compute_s, ComputeTime) else Constant(time_s=self.compute_s)

    def slow(self, *, worker: int, factor: float) -> Cluster:
        """A cluster in which this worker's forward and backward take `factor` times as long; nothing else changes."""
        return dataclasses.replace(self, slowness=_with(self.slowness, worker, factor))

    def idle(self, *, worker: int, idle_s: float) -> Cluster:
        """A cluster in which this worker sleeps for `idle_s` in every step: it is slow, but does not occupy a shared core."""
        return dataclasses.replace(self, idleness=_with(self.idleness, worker, idle_s))

    def slow_link(self, a: int, b: int, factor: float) -> Cluster:
        """A cluster in which messages between these two workers take `factor` times as long, in both directions."""
        others = {pair[:2]: pair for pair in self.link_factors}
        first, second = sorted((a, b))
        others[first, second] = (first, second, float(factor))
        return dataclasses.replace(self, link_factors=tuple(sorted(others.values())))

    def compute_of(self, worker: int) -> ComputeTime:
        """The model of this worker's compute times, without its factor."""
        times_s = dict(self.traces).get(worker)
        return self.compute if times_s is None else Trace(times_s=times_s)

    def factor(self, worker: int) -> float:
        return dict(self.slowness).get(worker, 1.0)

    def idle_of(self, worker: int) -> float:
        return dict(self.idleness).get(worker, self.idle_s)

    @property
    def codec_moves(self) -> dict[str, tuple[float, float]]:
        """For each measured codec, the number of vectors that take as long to move as encoding, and as decoding, takes."""
        return {
            name: (self.core_bytes_per_s / coded, self.core_bytes_per_s / decoded)
            for name, coded, decoded in self.codecs
        }


def _with(pairs: tuple[tuple[int, float], ...], worker: int, value: float) -> tuple[tuple[int, float], ...]:
    """The pairs in ascending order, with this worker's value replaced."""
    return tuple(sorted({**dict(pairs), worker: float(value)}.items()))
