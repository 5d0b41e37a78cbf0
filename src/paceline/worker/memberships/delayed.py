"""A worker without a launcher whose algorithm delays its gradients: `sequential(delay=...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.data.epoch_claims import LocalEpochClaims
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.membership.tables import SharedTables, local_tables
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers
from paceline.worker.gathering import NoGatherer
from paceline.worker.memberships.membership import BatchShare, Membership
from paceline.worker.memberships.memory import WorkerMemory, copies_of, own_arena


class DelayedMembership(Membership):
    """Keeps parameters and waiting gradients in private memory, and records nothing."""

    deals_batches = False

    def __init__(self, model: nn.Module, algorithm: Algorithm, *_: Any) -> None:
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        copies = copies_of(self.binding, algorithm, kinds=(algorithm.needs.kind,))
        arena = own_arena(self.binding, algorithm, is_private=True)
        self._memory = memory = WorkerMemory(self.binding, dense_buffers(model), algorithm, arena, copies=copies)
        self.ports, self.replica = memory.ports, memory.replica
        self.snapshot, self.stopped = memory.snapshot, lambda: False
        self.tables, self.gatherer = SharedTables(local_tables(1).__getitem__, 0), NoGatherer()

    def batches(self) -> BatchShare:
        return BatchShare(LocalEpochClaims())

    def has_updates(self) -> bool:
        return self.ports.shared.version > 0

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        if left is not None:
            self.ports.shared.replace(left.x)
        self.snapshot(out)
        return None

    def close(self, *, failed: bool) -> None:
        self._memory.close()
