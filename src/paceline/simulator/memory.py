"""Simulated shared parameters: the kinds of `paceline.memory`, with modelled times instead of real races.

Programs run one at a time, so between two waits everything happens at one virtual instant and needs no protection;
what takes time says so by waiting. The memory itself charges atomic operations (`Cluster.atomic_s`) only. Copies and updates
are the replica's to charge, and what a program moves by itself it says (`Ports.moved`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush
from typing import Any

import torch

from paceline.ports.shared import View
from paceline.simulator.hardware.core import Core

__all__ = [
    "EXCLUDES_NOBODY", "NoVector", "ReplicatedState", "SimulatedRacing", "SimulatedReplicated", "SimulatedSlots",
    "SimulatedStalenessCounts", "SimulatedVector", "SlotState", "VectorState",
]  # fmt: skip

EXCLUDES_NOBODY: AbstractContextManager[None] = nullcontext()
_NUM_BINS = 1024  # as `memory.staleness`


class VectorState:
    """One vector `x` (P,) for all programs, and its version."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.version = 0

    def of(self, core: Core) -> SimulatedVector:
        """What the worker with this core sees."""
        return SimulatedRacing(self, core)

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the vector as it is at this instant; returns its version."""
        out.copy_(self.x)
        return self.version

    def replace(self, x: torch.Tensor) -> None:
        """Gives the vector the values of `x` (P,)."""
        self.x.copy_(x)


class SimulatedVector:
    """What one worker sees of such a vector."""

    def __init__(self, state: VectorState, core: Core) -> None:
        self._state = state
        self._core = core
        self.x = state.x

    @property
    def version(self) -> int:
        return self._state.version

    def advance(self) -> int:
        self._state.version += 1
        return self._state.version


class SimulatedRacing(SimulatedVector):
    """One live vector without any exclusion; implements `RacingParameters`.

    Modelled: an update is written in blocks over its time, so others see torn views; the version counts it at the end.
    Not modelled: two writes of one component at the same instant, of which a real machine can lose one.
    """

    def writing(self) -> AbstractContextManager[None]:
        return EXCLUDES_NOBODY

    def advance(self) -> int:
        """Counts one update, by one atomic addition; returns the version that it made."""
        self._core.atomic()
        return super().advance()


class SlotState:
    """The pool and its head word, one for all workers.

    A free slot is one that nobody owns, nobody reads and that is not the head; the lowest is claimed first.

    Attributes:
        head: the newest version.
        num_slots: slots that were ever used.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.head = View(0, 0, x)
        self.num_slots = 1
        self._vectors = [x]
        self._readers = [0]
        self._free: list[int] = []

    @property
    def version(self) -> int:
        return self.head.version

    def of(self, core: Core) -> SimulatedSlots:
        return SimulatedSlots(self, core)

    def read(self) -> View:
        """The head, counted as being read."""
        self._readers[self.head.slot] += 1
        return self.head

    def leave(self, view: View) -> None:
        """Counts one reader less."""
        self._readers[view.slot] -= 1
        if not self._readers[view.slot] and view.slot != self.head.slot:
            heappush(self._free, view.slot)

    def claim(self) -> View:
        if self._free:
            slot = heappop(self._free)
        else:
            slot = self.num_slots
            self.num_slots += 1
            self._vectors.append(torch.empty_like(self._vectors[0]))
            self._readers.append(0)
        return View(slot, -1, self._vectors[slot])

    def compare_and_swap(self, new: View, after: View) -> bool:
        """Makes `new` the head if `after` still is."""
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
        """Vectors that were ever written."""
        return self.num_slots


class SimulatedSlots:
    """Immutable versions, published by one compare-and-swap; implements `SlotParameters`.

    Modelled: an atomic operation for each of `latest`, `claim` and `publish`; the compare-and-swap is exact at its
    instant. Filling a claimed slot takes the time of `Replica.apply`, and at a further attempt what the program says.
    """

    def __init__(self, state: SlotState, core: Core) -> None:
        self._state = state
        self._core = core
        self._protected: View | None = None
        self.touched_slots = state.touched_slots

    @property
    def version(self) -> int:
        return self._state.version

    def latest(self) -> View:
        self._core.atomic()
        self.leave()
        self._protected = self._state.read()
        return self._protected

    def leave(self) -> None:
        if self._protected is not None:
            self._state.leave(self._protected)
            self._protected = None

    def claim(self) -> View:
        self._core.atomic()
        return self._state.claim()

    def publish(self, new: View, after: View) -> bool:
        self._core.atomic()
        return self._state.compare_and_swap(new, after)

    def discard(self, new: View) -> None:
        self._state.discard(new)


class NoVector(torch.Tensor):
    """Stands for every vector where only times are simulated: its arithmetic gives itself, a tenth of a microsecond each.

    Attributes:
        num_bytes: of what it stands for; None: a whole parameter vector, or of one that is sent, what a server has.
        share: of that, in bytes, where it is a part, or coded.
    """

    num_bytes: int | None = None  # also of those that PyTorch makes, as sums
    share: float = 1.0
    # PyTorch asks a subclass for each of them, which takes ten times as long as all the arithmetic below.
    shape, dtype, nbytes = torch.Size([0]), torch.float32, 0  # type: ignore[assignment]

    def __new__(cls, num_bytes: int | None = None) -> NoVector:
        vector = torch.empty(0, dtype=torch.float32).as_subclass(cls)
        vector.num_bytes = num_bytes
        return vector

    def numel(self) -> int:
        return 0

    def chunk(self, chunks: int, dim: int = 0) -> tuple[NoVector, ...]:  # type: ignore[override]
        """Stand-ins for equal parts."""
        return tuple(self.coded(1 / chunks) for _ in range(chunks))

    def standing_for(self, num_bytes: int) -> NoVector:
        """One that stands for so many bytes."""
        return NoVector(num_bytes)

    def coded(self, share: float) -> NoVector:
        """One that stands for a part, or a payload, of so many times the bytes."""
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


class SimulatedReplicated:
    """A worker's own vector; implements `ReplicatedParameters`. Nobody else touches it, so nothing is charged."""

    __slots__ = ("updates", "version", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.version = self.updates = 0

    def writing(self) -> AbstractContextManager[None]:
        return EXCLUDES_NOBODY

    def advance(self, updates: int = 1) -> int:
        self.version += 1
        self.updates += updates
        return self.version

    def snapshot(self, out: torch.Tensor) -> int:
        out.copy_(self.x)
        return self.version


class ReplicatedState:
    """The vectors of all workers, as an onlooker sees them.

    Args:
        x: initial parameters (P,), copied for every worker.
        num_workers: how many.
        is_mean: whether the run's parameters are the mean of all workers' (gossip), and not worker 0's, which all share.
    """

    def __init__(self, x: torch.Tensor, num_workers: int, *, is_mean: bool) -> None:
        nothing = NoVector()
        self.workers = [SimulatedReplicated(x.clone() if x.numel() else nothing) for _ in range(num_workers)]
        self.own_models = is_mean
        self._lost: set[int] = set()

    def of(self, core: Core) -> SimulatedReplicated:
        return self.workers[core.worker_id]

    def lose(self, worker_id: int) -> None:
        """Leaves a dead worker's vector out from now on."""
        self._lost.add(worker_id)

    def come_back(self, worker_id: int) -> None:
        """Counts the vector again of a worker that was replaced; it is as the dead one left it."""
        self._lost.discard(worker_id)

    def model_ids(self) -> list[int]:
        """The workers that are not dead; all of them where all are."""
        return [one for one in range(len(self.workers)) if one not in self._lost] or [*range(len(self.workers))]

    @property
    def version(self) -> int:
        """Worker 0's number of updates; where each has a model of its own, that of all together, averages included."""
        return sum(one.version for one in self.workers) if self.own_models else self.workers[0].version

    def updates(self) -> list[int]:
        """How many updates each worker's vector has had."""
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
        """sum_i ||x_i - mean||^2 / n over the workers that are there, by their mean in float64; 0 where all agree."""
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
