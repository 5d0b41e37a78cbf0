"""One simulated machine: virtual time, a memory bus, shared parameters, and the ports that its workers are given."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from paceline.simulator.bus import MemoryBus
from paceline.simulator.cluster import Cluster
from paceline.simulator.collectives import AllReduceState, SimulatedCollectives
from paceline.simulator.core import Core, SimulatedClock
from paceline.simulator.locks import LockedState, LockState, SimulatedLocked
from paceline.simulator.memory import (
    RacingState,
    SimulatedRacing,
    SimulatedReplicated,
    SimulatedSlots,
    SimulatedStalenessCounts,
    SlotState,
)
from paceline.simulator.scheduler import Scheduler
from paceline.transport.base import MemoryRequest, Ports

__all__ = ["SimulatedMachine"]


class SimulatedMachine:
    """What the workers of one run share.

    Args:
        cluster: speeds.
        request: the kind of shared parameters that the algorithm runs on.
        x: initial parameters (P,), copied; empty for timing only.
        vector_bytes: size of one parameter vector, also where `x` is empty.
        batch_size: samples of a full batch.
        seed: of the run.

    Attributes:
        scheduler: runs the programs.
        shared: the state of the shared parameters (worker 0's where each has its own); has `version` and `snapshot`.
        num_blocks: pieces in which a replica writes and copies a vector of this kind.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: MemoryRequest,
        *,
        x: torch.Tensor,
        vector_bytes: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.cluster = cluster
        self.request = request
        self.scheduler = Scheduler()
        self.staleness = SimulatedStalenessCounts()
        self.num_blocks = cluster.racing_blocks if request.kind == "racing" else 1
        self._x = x
        self._vector_bytes = vector_bytes
        self._batch_size = batch_size
        self._seed = seed
        self._bus = MemoryBus(self.scheduler, cluster.core_bytes_per_s, cluster.bus_bytes_per_s)
        self._all_reduce = AllReduceState(self.scheduler, cluster.workers, cluster.wake_s)
        self.shared: Any = self._shared_state()

    def _shared_state(self) -> Any:
        x = self._x.clone()
        match self.request.kind:
            case "racing":
                return RacingState(x)
            case "slots":
                return SlotState(x)
            case "locked":
                lock = LockState(self.scheduler, self.cluster.wake_s, sharing=self.request.lock == "rwlock")
                return LockedState(x, lock)
            case "replicated":
                return SimulatedReplicated(x)

    def core(self, worker_id: int) -> Core:
        """A worker's core."""
        return Core(
            self.scheduler,
            self._bus,
            self.cluster,
            worker_id=worker_id,
            seed=self._seed,
            vector_bytes=self._vector_bytes,
            batch_size=self._batch_size,
        )

    def ports(self, core: Core) -> Ports:
        """What the worker with this core is given."""
        return Ports(
            worker_id=core.worker_id,
            num_workers=self.cluster.workers,
            clock=SimulatedClock(self.scheduler),
            random=Random(f"{self._seed}/{core.worker_id}"),
            shared=self._parameters(core),
            staleness=self.staleness,
            collectives=SimulatedCollectives(self._all_reduce, core) if self.request.collectives else None,
        )

    def _parameters(self, core: Core) -> Any:
        match self.request.kind:
            case "racing":
                return SimulatedRacing(self.shared, core)
            case "slots":
                return SimulatedSlots(self.shared, core)
            case "locked":
                return SimulatedLocked(self.shared, core)
            case "replicated":
                return self.shared if core.worker_id == 0 else SimulatedReplicated(self._x.clone())

    def base_arguments(self, ports: Ports) -> dict[str, Any]:
        """What a worker's `BaseReplica` needs, except its binding and its recorder."""
        waits = [port for port in (ports.clock, ports.shared, ports.collectives) if hasattr(port, "waited_s")]
        return {
            "waits": waits,
            "staleness": self.staleness if self.request.staleness_counts else None,
            "stopped": _never,
            "now_s": ports.clock.now_s,
        }


def _never() -> bool:
    return False  # a simulation that is stopped ends at once, wherever its programs are
