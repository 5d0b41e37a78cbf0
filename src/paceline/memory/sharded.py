"""One parameter vector per worker; the workers of a group hold different shards, which together are the model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.memory.atomics import load, store
from paceline.memory.replicated import ReplicatedVector
from paceline.memory.segment_part import PartPlan
from paceline.optim.sharding import Sharding

_TRIES = 200  # to find all shards at one version: they differ only while some workers have made a round's update
_BETWEEN_TRIES_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class _ShardedPlan(PartPlan):
    sharding: Sharding


class ShardedVectors(ReplicatedVector):
    """A worker's own vector `x` (P,) with its shards; the interface to the outside is the whole model (W,).

    Costs: a snapshot copies the vectors of one group, or of all groups if replicas have their own models.
    """

    plan_type = _ShardedPlan

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        self._sharding: Sharding = self._plan.sharding  # pyright: ignore[reportAttributeAccessIssue]

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        for worker in range(self._plan.num_writers):
            self._sharding.cut(x, worker % self._sharding.parts, self._vector(f"x{worker}"))
            store(self._word("words", worker), version)

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the model into `out` (W,); returns its version. If replicas have their own models, it is their mean."""
        return super().snapshot(out) if self.own_models else self.model(0, out)

    def model_ids(self) -> list[int]:
        """The first worker of each model whose shards are all present; of all models if none is complete."""
        there, parts = set(super().model_ids()), self._sharding.parts
        every = range(0, self._plan.num_writers, parts)
        return [one for one in every if there.issuperset(range(one, one + parts))] or list(every)

    def model(self, worker: int, out: torch.Tensor) -> int:
        """Assembles the model that begins at `worker` from all its shards, in `out` (W,); returns its version.

        All are of one version, unless the run was stopped between two workers' updates of a round.
        """
        workers = range(worker, worker + self._sharding.parts)
        locals_ = [torch.empty_like(self.x) for _ in workers]
        versions: list[int] = []
        for _ in range(_TRIES):
            versions = [self.copy_of(one, local) for one, local in zip(workers, locals_, strict=True)]
            if len(set(versions)) == 1 and all(load(self._word("words", w)) == versions[0] for w in workers):
                break
            time.sleep(_BETWEEN_TRIES_S)
        self._sharding.assemble(locals_, out)
        return max(versions)

    def replace(self, x: torch.Tensor) -> None:
        for worker in range(self._plan.num_writers):
            with self._lock(worker).writing():
                self._sharding.cut(x, worker % self._sharding.parts, self._vector(f"x{worker}"))
