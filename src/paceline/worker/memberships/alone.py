"""A worker that nobody launched: a run of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.data.epoch_claims import LocalEpochClaims
from paceline.membership.final_mean import FinalMean, Given, LeftWeights
from paceline.membership.tables import SharedTables, local_tables
from paceline.model_parallel.layouts import AnyLayout, part_of
from paceline.vectors.flat import FlatBinding
from paceline.vectors.model_state import dense_buffers
from paceline.worker.gathering import NoGatherer
from paceline.worker.memberships.membership import BatchShare, Membership
from paceline.worker.memberships.memory import WorkerMemory, copies_of, own_arena

__all__ = ["AloneMembership"]

_PRIVATE_KINDS = ("replicated", "racing")  # of parameters, which are a plain vector where nobody else has them


class AloneMembership(Membership):
    """Equal to plain training bit for bit; nothing is recorded.

    Args:
        model: on the CPU, or on a GPU where the algorithm lets it.
        algorithm: how the workers would agree.
        layout: of a model that several workers would share.
    """

    deals_batches = False

    def __init__(self, model: nn.Module, algorithm: Algorithm, *_: Any, layout: AnyLayout | None = None) -> None:
        self.part = part_of(model, layout, 0, 1, self.seed) if layout is not None else None
        parameters = model.parameters() if self.part is None else self.part.binding.parameters
        self.binding = FlatBinding(parameters, on_any_device=True)
        copies = copies_of(self.binding, algorithm, kinds=_PRIVATE_KINDS)
        arena = own_arena(self.binding, algorithm, is_private=algorithm.needs.kind in _PRIVATE_KINDS)
        self._memory = memory = WorkerMemory(self.binding, dense_buffers(model), algorithm, arena, copies=copies)
        if algorithm.needs.mailbox:
            memory.meet(arena.shared_store())
        if self.part is not None:
            memory.ports = self.part.begin(memory.ports, {}, algorithm, carrier_counts=True)
        self.ports, self.replica = memory.ports, memory.replica
        self.snapshot, self.stopped = memory.snapshot, _never
        self.tables, self.gatherer = SharedTables(local_tables(1).__getitem__, 0), NoGatherer()

    def batches(self) -> BatchShare:
        """As of `Membership`; nobody claims any."""
        return BatchShare(LocalEpochClaims())

    def has_updates(self) -> bool:
        """As of `Membership`; versions of a model of its own count averages, too."""
        return not self._memory.algorithm.gossip and self.ports.shared.version > 0

    def final_model(self, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
        """As of `Membership`."""
        self.snapshot(out)
        if left is not None:
            self.ports.shared.replace(left.x)
            out.copy_(left.x)
        return None

    def close(self, *, failed: bool) -> None:
        """As of `Membership`."""
        self._memory.close()


def _never() -> bool:
    return False
