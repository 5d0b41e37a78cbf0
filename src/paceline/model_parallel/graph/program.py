"""The program of a placed model's workers: each steps on its own part, and parameters need no synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.algorithms import Algorithm, registry
from paceline.algorithms.plain import work_plainly
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, RacingParameters


@dataclass(frozen=True, kw_only=True)
class PlacedProgram(Algorithm):
    """Every worker computes and trains a part of one model; only a part of a plan can choose it.

    All workers have the same batches in the same order. The parameters are one vector, of which each worker writes the
    elements of its part; without shared memory, each has a vector of its own until all parts are sent at the end. Worker 0
    records the steps; the others record theirs without samples, since the batches are the same.

    Costs per step: the plan's transfers.
    """

    unlisted_name: ClassVar[str] = "placed"  # in records and messages; no registry has it
    same_batches: ClassVar[bool] = True

    @property
    def patience_s(self) -> float:
        """As in `Algorithm`; long enough for a large tensor on a slow link."""
        return 40.0

    @property
    def waits_for(self) -> None:
        return None

    @property
    def needs(self) -> Needs:
        return Needs("racing", mailbox=True)

    def work(self, replica: Replica, ports: Ports[RacingParameters]) -> None:
        """x: all parameters (P,); this worker's step changes its part."""
        work_plainly(replica, ports, counts=ports.worker_id == 0)


def algorithm_named(spec: str) -> Algorithm:
    """The algorithm of a run's records, which may be of a placed model."""
    return PlacedProgram() if spec == PlacedProgram.unlisted_name else registry.build(spec)
