"""One simulated worker's core in virtual time: computes, moves vectors, waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Disturbances
from paceline.simulator.hardware.bus import MemoryBus
from paceline.simulator.scheduler import Scheduler

COPY_VECTORS = 2.0  # one read, one written
SUM_VECTORS = 3.0  # two read, one written


@dataclass(eq=False)
class OwnMemory:
    """The memories of workers with a machine each: nothing is shared."""

    scheduler: Scheduler
    core_bytes_per_s: float

    def move(self, num_bytes: float) -> None:
        if num_bytes > 0:
            self.scheduler.sleep(num_bytes / self.core_bytes_per_s)


class SimulatedClock:
    """Virtual time for a worker program; sums up the time slept."""

    __slots__ = ("_scheduler", "now_s", "waited_s")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now_s = scheduler.time_s  # the virtual seconds since the run began; one function for all workers
        self.waited_s = 0.0  # seconds slept; the caller reads it and resets it to 0

    def sleep_s(self, duration_s: float) -> None:
        self.waited_s += duration_s
        self._scheduler.sleep(duration_s)


class Core:
    """One worker's share of the cluster.

    Attributes:
        moved_s: seconds of memory traffic of `work` itself, not of a further program, outside `Replica.copy` and `apply`;
            the replica reads it and resets it to 0.
        die: ends this worker, called by the scheduler at the step at which a fault kills it.
    """

    __slots__ = (
        "_batch_size", "_disturbances", "_draws_s", "_factor", "_idle_s", "_memory", "cluster", "die", "moved_s",
        "overlaps", "scheduler", "vector_bytes", "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        memory: MemoryBus | OwnMemory,
        cluster: Cluster,
        *,
        worker_id: int,
        seed: int,  # of the run; a worker's compute times depend only on it and the worker
        vector_bytes: int,
        batch_size: int,  # samples of the batch that `cluster.compute_s` refers to; 0: this worker's first batch
        disturbances: Disturbances | None = None,  # the effects of faults on its computing; None: no faults
        overlaps: bool = False,  # whether its messages travel while it computes: over a network, but not through its memory
    ) -> None:
        self.scheduler = scheduler
        self._memory = memory
        self.cluster = cluster
        self.worker_id = worker_id
        self.vector_bytes = vector_bytes
        self._draws_s = cluster.compute_of(worker_id).draws_s(Random(f"compute/{seed}/{worker_id}"))
        self._batch_size = batch_size
        self._factor = cluster.factor(worker_id)
        self._idle_s = cluster.idle_of(worker_id)
        self._disturbances = disturbances
        self.overlaps = overlaps
        self.moved_s = 0.0
        self.die: Callable[[], None] | None = None

    def know_batch_size(self, samples: int) -> None:
        """Uses the first batch's size as the size of a full batch, unless that is already known."""
        self._batch_size = self._batch_size or samples

    def compute(self, samples: int, *, goes_on: bool = False) -> None:
        """Sleeps as a step does, unless it `goes_on`, then computes; a short batch takes proportionally less."""
        duration_s, share = self._begin(samples, goes_on=goes_on)
        if self._disturbances is not None:
            duration_s = self._disturbances.stretched_s(self.scheduler.now_s, duration_s)
        self.occupy(duration_s, share)

    def compute_in_parts(self, samples: int, parts: Sequence[float], *, goes_on: bool = False) -> Iterator[int]:
        """Waits equally long, but yields at the end of each of the `parts`: shares of the time that add up to 1."""
        duration_s, share = self._begin(samples, goes_on=goes_on)
        begun_s, computed, took_s = self.scheduler.now_s, 0.0, 0.0
        for number, part in enumerate(parts):
            part_s = part * duration_s
            if self._disturbances is not None:
                computed += part
                before_s, took_s = took_s, self._disturbances.stretched_s(begun_s, computed * duration_s)
                part_s = took_s - before_s
            self.occupy(part_s, part * share)
            yield number

    def _begin(self, samples: int, *, goes_on: bool) -> tuple[float, float]:
        """Draws the undisturbed compute time; returns it and the share of a full batch."""
        self.know_batch_size(samples)
        duration_s, share = next(self._draws_s) * self._factor, samples / self._batch_size if self._batch_size else 1.0
        if not goes_on:
            if self._disturbances is not None and self._disturbances.begin_step() and self.die is not None:
                self.scheduler.call_at(self.scheduler.now_s, self.die)
            if self._idle_s:
                self.scheduler.sleep(self._idle_s)
        return duration_s * share, share

    def occupy(self, duration_s: float, share: float) -> None:
        """Waits as long as computing `share` of a full batch takes, `duration_s` when alone."""
        self.scheduler.sleep(duration_s)

    def move(self, num_vectors: float) -> None:
        """Waits for the memory traffic of `num_vectors` vectors, on behalf of the memory or of a program itself."""
        begun_s = self.scheduler.now_s
        self._move(num_vectors)
        if self.scheduler.current.is_main:
            self.moved_s += self.scheduler.now_s - begun_s

    def _move(self, num_vectors: float) -> None:
        self._memory.move(num_vectors * self.vector_bytes)

    def copy(self, parts: int = 1) -> None:
        """Waits as long as copying one vector, or one of its `parts`, takes."""
        self._memory.move(COPY_VECTORS * self.vector_bytes / parts)

    def update(self, parts: int = 1) -> None:
        """Waits as long as an optimizer step on one vector, or on one of its `parts`, takes."""
        self._memory.move(self.cluster.update_vectors * self.vector_bytes / parts)

    def atomic(self) -> None:
        self.scheduler.sleep(self.cluster.atomic_s)
