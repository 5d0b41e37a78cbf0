"""Simulated shared parameters: the kinds of `paceline.memory`, with modelled times instead of real races.

Programs run one at a time, so between two waits everything happens at one virtual instant and needs no protection;
an operation that takes time waits. The memory itself charges only for atomic operations (`Cluster.atomic_s`). The replica
charges for copies and updates, and programs report their own moves (`Ports.moved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import torch

from paceline.ports.private import PrivateVector
from paceline.ports.shared import View
from paceline.simulator.hardware.core import Core

_NUM_BINS = 1024  # like `memory.staleness`


class SimulatedVector(PrivateVector):
    """One vector `x` (P,) for all programs, and its version."""

    def initialise(self, x: torch.Tensor, version: int) -> None:
        """Begins at another vector (P,) and version than the model's own."""
        self.restore(version, x)


class SimulatedRacing(SimulatedVector):
    """One live vector without mutual exclusion; implements `RacingParameters` for all workers.

    Modelled: an update is written in blocks over its duration, so others see torn views; the version counts it at the end.
    Not modelled: lost writes, when two workers write one component at the same instant of real time.
    """

    def __init__(self, x: torch.Tensor, caller: Callable[[], Core]) -> None:
        super().__init__(x)
        self._caller = caller

    def of(self, core: Core) -> SimulatedRacing:
        return self

    def advance(self, updates: int = 1) -> int:
        """Counts one update by an atomic addition; returns the resulting version."""
        self._caller().atomic()
        return super().advance(updates)


class SimulatedSlots:
    """Immutable versions, published by one compare-and-swap; implements `SlotParameters` for all workers.

    Modelled: an atomic operation for each of `latest`, `claim` and `publish`; the compare-and-swap is exact at its
    instant. Filling a claimed slot takes the time of `Replica.apply`; for a repeated attempt, the time that the program
    reports. A slot is free if it has no owner and no readers and is not the head; the lowest free slot is claimed first.
    """

    def __init__(self, x: torch.Tensor, caller: Callable[[], Core]) -> None:
        self.head = View(0, 0, x)
        self.num_slots = 1
        self._caller = caller
        self._vectors = [x]
        self._readers = [0]
        self._free: list[int] = []
        self._read: dict[int, View] = {}  # by worker

    def of(self, core: Core) -> SimulatedSlots:
        return self

    @property
    def version(self) -> int:
        return self.head.version

    def initialise(self, x: torch.Tensor, version: int) -> None:
        self.head.x.copy_(x)
        self.head = View(self.head.slot, version, self.head.x)

    def latest(self) -> View:
        """The head, registered as being read by this worker."""
        self._caller().atomic()
        self.leave()
        self._readers[self.head.slot] += 1
        self._read[self._caller().worker_id] = self.head
        return self.head

    def leave(self) -> None:
        view = self._read.pop(self._caller().worker_id, None)
        if view is None:
            return
        self._readers[view.slot] -= 1
        if not self._readers[view.slot] and view.slot != self.head.slot:
            heappush(self._free, view.slot)

    def claim(self) -> View:
        self._caller().atomic()
        if self._free:
            slot = heappop(self._free)
        else:
            slot = self.num_slots
            self.num_slots += 1
            self._vectors.append(torch.zeros_like(self._vectors[0]))  # updates write parameters, not padding
            self._readers.append(0)
        return View(slot, -1, self._vectors[slot])

    def publish(self, new: View, after: View) -> bool:
        self._caller().atomic()
        if self.head.version != after.version:
            return False
        old = self.head
        self.head = View(new.slot, after.version + 1, new.x)
        if not self._readers[old.slot]:
            heappush(self._free, old.slot)
        return True

    def discard(self, new: View) -> None:
        heappush(self._free, new.slot)

    def snapshot(self, out: torch.Tensor) -> int:
        out.copy_(self.head.x)
        return self.head.version

    def replace(self, x: torch.Tensor) -> None:
        self.head.x.copy_(x)

    def touched_slots(self) -> int:
        return self.num_slots


class NoVector(torch.Tensor):
    """Stands for every vector if only times are simulated: each arithmetic operation returns the same object, in 0.1 us.

    Attributes:
        num_bytes: size of the vector that it stands for; None: a whole parameter vector or, if it is sent, a server's shard.
    """

    num_bytes: int | None = None  # also for those that PyTorch makes, such as sums
    share: float = 1.0  # of that size, if it is a part, or encoded
    # PyTorch's lookup of each on a subclass takes ten times as long as all the arithmetic below.
    shape, dtype, nbytes = torch.Size([0]), torch.float32, 0  # type: ignore[assignment]

    def __new__(cls, num_bytes: int | None = None) -> NoVector:
        vector = torch.empty(0, dtype=torch.float32).as_subclass(cls)
        vector.num_bytes = num_bytes
        return vector

    def numel(self) -> int:
        return 0

    def chunk(self, chunks: int, dim: int = 0) -> tuple[NoVector, ...]:  # type: ignore[override]
        return tuple(self.coded(1 / chunks) for _ in range(chunks))

    def standing_for(self, num_bytes: int) -> NoVector:
        return NoVector(num_bytes)

    def coded(self, share: float) -> NoVector:
        """A stand-in for a part or a payload that is `share` times as large."""
        coded = NoVector(self.num_bytes)
        coded.share = self.share * share
        return coded

    def clone(self) -> NoVector:  # type: ignore[override]
        return self

    def __sub__(self, other: object) -> NoVector:  # type: ignore[override]
        return self

    def add_(self, other: object, *, alpha: float = 1.0) -> NoVector:  # type: ignore[override]
        return self

    def _itself(self, *_: Any, **__: Any) -> NoVector:
        return self

    sub_ = mul_ = div_ = copy_ = __add__ = __mul__ = __rmul__ = _itself  # type: ignore[assignment]
    new_zeros = __getitem__ = __setitem__ = _itself  # type: ignore[assignment]


class SimulatedReplicated(PrivateVector):
    """A worker's own vector; implements `ReplicatedParameters`. No other worker touches it, so it charges nothing."""

    __slots__ = ("_ends",)

    def __init__(self, x: torch.Tensor, ends: list[int | None]) -> None:
        super().__init__(x)
        self._ends = ends

    def go_on_with(self, members: Sequence[int]) -> None:
        for worker, end in enumerate(self._ends):
            if end is None and worker not in members:
                self._ends[worker] = self.version


class ReplicatedState:
    """The vectors of all workers, as an observer sees them.

    Args:
        is_mean: whether the run's parameters are the mean of all workers' (gossip) rather than one model that all share.

    Attributes:
        ends: the last update in which each dead worker has a part; None if the others have made none without it.
    """

    def __init__(self, x: torch.Tensor, num_workers: int, *, is_mean: bool) -> None:
        nothing = NoVector()
        self.ends: list[int | None] = [None] * num_workers
        self.workers = [SimulatedReplicated(x.clone() if x.numel() else nothing, self.ends) for _ in self.ends]
        self.own_models = is_mean
        self._lost: set[int] = set()

    def initialise(self, x: torch.Tensor, version: int) -> None:
        for worker in self.workers:
            worker.restore(version, x)

    def of(self, core: Core) -> SimulatedReplicated:
        return self.workers[core.worker_id]

    def lose(self, worker_id: int) -> None:
        self._lost.add(worker_id)

    def come_back(self, worker_id: int) -> None:
        """Includes the vector of a replaced worker again, as the dead one left it."""
        self._lost.discard(worker_id)

    def enter(self, worker_id: int, giver: int) -> None:
        """Includes a replacement, with another worker's vector."""
        own, other = self.workers[worker_id], self.workers[giver]
        own.x.copy_(other.x)
        own.version = other.version
        self.ends[worker_id] = None
        self.come_back(worker_id)

    def model_ids(self) -> list[int]:
        """The workers that are alive; if all are dead, all, the one with the newest model first."""
        workers = range(len(self.workers))
        alive = [one for one in workers if one not in self._lost]
        return alive or sorted(workers, key=lambda one: -self.workers[one].version)

    @property
    def version(self) -> int:
        """Updates of the first worker that is alive; if each has its own model, the sum over all, including averages."""
        if self.own_models:
            return sum(one.version for one in self.workers)
        return self.workers[self.model_ids()[0]].version

    def updates(self) -> list[int]:
        return [one.updates for one in self.workers]

    def snapshot(self, out: torch.Tensor) -> int:
        if not self.own_models or len(self.model_ids()) == 1:
            out.copy_(self.workers[self.model_ids()[0]].x)
        else:
            out.copy_(self._mean())
        return self.version

    def replace(self, x: torch.Tensor) -> None:
        for worker in self.workers:
            worker.x.copy_(x)

    def model(self, worker: int, out: torch.Tensor) -> int:
        out.copy_(self.workers[worker].x)
        return self.workers[worker].version

    def consensus_distance(self, mean: torch.Tensor | None = None) -> float:
        """sum_i ||x_i - mean||^2 / n over the workers that are alive, with their mean in float64; 0 if all agree."""
        mean = self._mean()
        distances = [float((self.workers[one].x.double() - mean).square().sum()) for one in self.model_ids()]
        return sum(distances) / len(distances)

    def _mean(self) -> torch.Tensor:
        total = torch.zeros_like(self.workers[0].x, dtype=torch.float64)
        for one in self.model_ids():
            total += self.workers[one].x
        return total / len(self.model_ids())


class SimulatedStalenessCounts:
    """Counts of updates by staleness, over all workers; implements `StalenessCounts`."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BINS
        self._total = 0

    def add(self, staleness: int) -> None:
        self._counts[min(max(staleness, 0), _NUM_BINS - 1)] += 1
        self._total += 1

    def share_below(self, staleness: int) -> float:
        return sum(self._counts[: max(staleness, 0)]) / self._total if self._total else 0.0

    def total(self) -> int:
        return self._total
