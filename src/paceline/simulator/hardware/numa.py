"""The memories and cores of a machine with several sockets, in virtual time; `sockets.py` describes the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.bus import MemoryBus
from paceline.simulator.hardware.core import Core
from paceline.simulator.hardware.sockets import Place, Placing, Sockets
from paceline.simulator.scheduler import Scheduler

_SHARED_VECTORS = 2.0  # a move or an update reads one shared vector and writes one; the rest is the worker's own


@dataclass(eq=False)
class Line:
    """A contended cache line: one core after the other takes it; a transfer from a distant core takes longer."""

    scheduler: Scheduler
    near_s: float
    far_s: float
    socket: int | None = None  # that holds the line
    free_at_s: float = 0.0

    def take(self, socket: int) -> None:
        """Waits until a core of this socket has had its turn."""
        now_s = self.scheduler.now_s
        is_far = self.socket not in (None, socket)
        self.socket = socket
        self.free_at_s = max(now_s, self.free_at_s) + (self.far_s if is_far else self.near_s)
        self.scheduler.sleep(self.free_at_s - now_s)


class SocketMachine:
    """Shared state of the workers of one machine with several sockets.

    A byte of another socket's memory counts `remote_factor` times on that memory: one worker alone takes that many times as
    long, and many workers get that much less bandwidth. Vectors in several memories are moved part by part, the local part
    first.

    Args:
        is_pool: whether all workers write shared vectors first.

    Attributes:
        line: the cache line that all workers touch: the lock's word, the head, the counter.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, placing: Placing, *, is_pool: bool) -> None:
        sockets = cluster.sockets
        assert sockets is not None
        self.sockets: Sockets = sockets
        self.places = sockets.places(cluster.workers, pin=placing.pin)
        self.line = Line(scheduler, cluster.atomic_s, sockets.far_atomic_s)
        self._shares = placing.shares(sockets, self.places, is_pool=is_pool)
        self.memories = [
            MemoryBus(scheduler, cluster.core_bytes_per_s, cluster.bus_bytes_per_s) for _ in range(sockets.count)
        ]
        gain = sockets.threads_gain if sockets.threads_per_core > 1 else 1.0
        # If n workers compute on a core, each gets min(1, gain / n) of it, like a shared bus.
        self._cores = {place: MemoryBus(scheduler, 1.0, gain) for place in self.places}

    def move(self, socket: int, shared_bytes: float, own_bytes: float) -> None:
        """Waits while a worker on this socket moves bytes of shared vectors and of private memory."""
        shares, factor = self._shares, self.sockets.remote_factor
        self.memories[socket].move(own_bytes + shares[socket] * shared_bytes)
        for other in range(socket + 1, socket + len(shares)):
            node = other % len(shares)
            self.memories[node].move(factor * shares[node] * shared_bytes)

    def compute(self, place: Place, alone_s: float) -> None:
        """Waits while a core computes; it takes `alone_s` if no other worker computes there."""
        self._cores[place].move(alone_s)


class SocketCore(Core):
    """A worker's hardware thread."""

    __slots__ = ("_has_copy", "_machine", "_place")

    def __init__(self, *, machine: SocketMachine, **named: Any) -> None:
        place = machine.places[named["worker_id"]]
        super().__init__(memory=machine.memories[place[0]], **named)
        self._machine = machine
        self._place = place
        self._has_copy = False

    def occupy(self, duration_s: float, share: float) -> None:
        """Waits as long as a gradient takes, `duration_s` when alone: memory traffic, then arithmetic."""
        rate = self.cluster.core_bytes_per_s
        own = min(self._machine.sockets.gradient_bytes * share, duration_s * rate)
        vector = min(self.vector_bytes, duration_s * rate - own)
        shared = 0.0 if self._has_copy else vector
        self._has_copy = False
        self._machine.move(self._place[0], shared, own + vector - shared)
        self._machine.compute(self._place, duration_s - (own + vector) / rate)

    def copy(self, parts: int = 1) -> None:
        self._has_copy = True  # so the next gradient reads its own
        part = self.vector_bytes / parts
        self._machine.move(self._place[0], part, part)

    def update(self, parts: int = 1) -> None:
        self._move(self.cluster.update_vectors / parts, _SHARED_VECTORS / parts)

    def atomic(self) -> None:
        """Waits until this core has had the cache line and released it."""
        self._machine.line.take(self._place[0])

    def _move(self, num_vectors: float, shared_vectors: float = _SHARED_VECTORS) -> None:
        shared = min(num_vectors, shared_vectors) * self.vector_bytes
        self._machine.move(self._place[0], shared, num_vectors * self.vector_bytes - shared)
