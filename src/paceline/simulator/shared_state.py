"""The shared parameters of a simulated run, of the kind that its algorithm needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.ports.shared import Needs
from paceline.simulator.cluster import Cluster
from paceline.simulator.hardware.core import Core
from paceline.simulator.locks import LockedState, LockState
from paceline.simulator.memory import ReplicatedState, SimulatedRacing, SimulatedSlots
from paceline.simulator.scheduler import Scheduler
from paceline.simulator.served import ServedState


def shared_state(
    needs: Needs,
    x: torch.Tensor,
    cluster: Cluster,
    scheduler: Scheduler,
    caller: Callable[[], Core],
    *,
    spin_s: float,
    is_gossip: bool,
    num_servers: int,
    update_vectors: float,
) -> Any:
    """The state for all workers, which owns the initial parameters `x` (P,).

    `caller` gives the core of the calling program; `update_vectors` are the vectors that an update at a server moves.
    """
    match needs.kind:
        case "racing":
            return SimulatedRacing(x, caller)
        case "slots":
            return SimulatedSlots(x, caller)
        case "locked":
            return LockedState(x, LockState(scheduler, cluster.wake_s, sharing=needs.lock == "rwlock", spin_s=spin_s))
        case "replicated":
            return ReplicatedState(x, cluster.workers, is_mean=is_gossip)
        case "served":
            return ServedState(x, cluster.workers, num_servers, averaged=needs.averaged, update_vectors=update_vectors)
