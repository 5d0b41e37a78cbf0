"""SGD with one worker: what the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.algorithms.base import Algorithm
from paceline.transport.base import Ports, Replica
from paceline.transport.parameters import MemoryRequest

__all__ = ["Sequential"]


@dataclass(frozen=True, kw_only=True)
class Sequential(Algorithm):
    """Plain SGD: one worker, one update after the other.

    Costs nothing beyond the user's own step. Use it as the baseline of a comparison.
    """

    max_workers: ClassVar[int | None] = 1

    @property
    def memory(self) -> MemoryRequest:
        """One vector, whose only writer is this worker."""
        return MemoryRequest("racing")

    def work(self, replica: Replica, ports: Ports) -> None:
        """x: parameters (P,)."""
        shared = ports.shared
        for _ in replica.steps():
            version = shared.version
            replica.gradient(at=shared.x, version=version)
            with shared.writing():
                replica.apply(to=shared.x)
                replica.applied(shared.advance(), gradient_version=version)
