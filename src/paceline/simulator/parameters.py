"""The shared parameters as one simulated program sees them."""

from __future__ import annotations

from typing import Any

from paceline.simulator.core import Core
from paceline.simulator.locks import SimulatedLocked
from paceline.simulator.memory import SimulatedRacing, SimulatedSlots
from paceline.simulator.served import SimulatedCopy

__all__ = ["parameters_of"]


def parameters_of(kind: str, shared: Any, core: Core, num_workers: int, num_servers: int) -> Any:
    """What `Ports.shared` is for the program of `core`.

    Args:
        kind: of parameters, as of `MemoryRequest`.
        shared: what all programs share.
        core: of the program; those of servers and their copies are numbered after the workers'.
        num_workers: of the run.
        num_servers: of the run.
    """
    match kind:
        case "racing":
            return SimulatedRacing(shared, core)
        case "slots":
            return SimulatedSlots(shared, core)
        case "locked":
            return SimulatedLocked(shared, core)
        case "replicated":
            return shared.workers[core.worker_id]
        case "served" if core.worker_id >= num_workers + num_servers and num_servers:
            shard = shared.copy((core.worker_id - num_workers) % num_servers)
            shard.core = core
            return shard
        case "served" if core.worker_id >= num_workers or not num_servers:
            shard = shared.shards[max(0, core.worker_id - num_workers)]
            shard.core = core if num_servers else None
            return shard
        case "served":
            return SimulatedCopy(shared.x.clone(), shared.ranges)
