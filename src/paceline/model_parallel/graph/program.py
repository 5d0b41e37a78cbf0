"""The program of a placed model's workers: each steps on its own part, and parameters need no synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.algorithms import Algorithm
from paceline.algorithms.plain import work_plainly
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, RacingParameters


@dataclass(frozen=True, kw_only=True)
class PlacedProgram(Algorithm):
    """Every worker computes and trains a part of one model; only `launch(plan=...)` can choose it.

    All workers have the same batches in the same order. The parameters are one vector; each worker writes the elements of
    its part. Worker 0 records the steps; the others record theirs without samples, since the batches are the same.

    Costs per step: the plan's transfers.
    """

    unlisted_name: ClassVar[str] = "placed"  # in records and messages; no registry has it
    same_batches: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs("racing", mailbox=True)

    def work(self, replica: Replica, ports: Ports[RacingParameters]) -> None:
        """x: all parameters (P,); this worker's step changes its part."""
        work_plainly(replica, ports, counts=ports.worker_id == 0)
