"""One simulated worker's membership in the run of the user's own function."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.membership.environment import WorkerEnvironment
from paceline.membership.final_mean import FinalMean, Given, LeftWeights, take_final_mean
from paceline.vectors.flat import FlatBinding

__all__ = ["SimulatedSession"]

_DEADLINE_S = 600.0  # of virtual time, for the mean at the end


class SimulatedSession:
    """One simulated worker's membership in the run of `simulate`; stands in for `Session`.

    Buffers are as in `Session`: one copy that all workers write; in lockstep every worker keeps its own.
    """

    def __init__(self, simulation: Any, model: nn.Module, binding: FlatBinding, own: WorkerEnvironment) -> None:
        machine, record = simulation.machine, simulation.record
        assert machine is not None
        assert record is not None
        self.binding = binding
        self.tell_epoch = simulation.tell_epoch
        self.environment, self.membership = own, None
        self._simulation = simulation
        self.gathering = simulation.gathering
        self._core = machine.core(own.worker_id)
        self._epoch_claims = simulation.epoch_claims
        self._after_backward = simulation.after_backward
        self.ports = machine.ports(self._core)
        self._machine = machine
        self._record = record
        self._is_gossip = simulation.algorithm is not None and simulation.algorithm.gossip
        self._shared_buffers: list[torch.Tensor] = []
        self._buffers = list(model.buffers())
        for name, buffer in model.named_buffers():
            if name in simulation.buffers:
                buffer.data = simulation.buffers[name]
                self._shared_buffers.append(buffer)
        control = {"checkpoint_epoch": -2, "epoch": 0}
        self.arena = SimpleNamespace(
            load=control.__getitem__,
            store=control.__setitem__,
            extra=simulation.tables.__getitem__,
            shared=self.ports.shared
            if machine.request.kind == "replicated" and not self._is_gossip
            else machine.shared,
        )

    def stopped(self) -> bool:
        """Never: a simulation that ends is cut off wherever its programs are."""
        return False

    def base_arguments(self) -> dict[str, Any]:
        """What the replica needs."""
        base = self._machine.base_arguments(self.ports)
        return {
            **base,
            "binding": self.binding,
            "recorder": self._record.recorder(self.ports.worker_id),
            "core": self._core,
            "after_backward": self._after_backward,
        }

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Nothing to restore."""
        return 0

    def has_updates(self) -> bool:
        """Whether a worker has made an update."""
        shared = self._machine.shared
        return any(shared.updates()) if self._is_gossip else shared.version > 0

    def final_model(self, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
        """The run's model (P,) once all have ended, or the mean of all models, which they send each other; or what is left."""
        simulation, mean = self._simulation, None
        simulation.left = left or simulation.left
        if self._is_gossip:
            out.copy_(self.ports.shared.x)
            mean = take_final_mean(self.ports, out, _DEADLINE_S)
        scheduler = self._machine.scheduler
        scheduler.call_at(scheduler.now_s, partial(self._machine.trains_no_more, self.ports.worker_id))
        simulation.ending.wait(self.ports.worker_id)
        if simulation.left is not None:
            self._machine.shared.replace(simulation.left.x)
            out.copy_(simulation.left.x)
        elif not self._is_gossip:
            self.arena.shared.snapshot(out)
        for buffer, value in zip(self._buffers, simulation.last_buffers, strict=True):
            buffer.data.copy_(value)
        return mean

    def batch_claims(self) -> dict[str, Any]:
        """Where batches are claimed."""
        return {"counts": self._epoch_claims}

    def own_records(self) -> np.ndarray:
        """This worker's records."""
        return self._record.records_of(self.ports.worker_id)

    def close(self, *, failed: bool = False) -> None:
        """Gives the model memory of its own again."""
        self._simulation.ending.leave(self.ports.worker_id)
        self.binding.release()
        for buffer in self._shared_buffers:
            buffer.data = buffer.data.clone()
