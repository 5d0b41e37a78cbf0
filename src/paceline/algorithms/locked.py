"""Lock-based asynchronous SGD: one writer at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.algorithms.backoff import Backoff, NoBackoff
from paceline.algorithms.base import Algorithm, WaitsFor
from paceline.algorithms.step_size import FullStep, StepSize
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import LockedParameters, Needs


@dataclass(frozen=True, kw_only=True)
class Locked(Algorithm):
    """Lock-based asynchronous SGD: copy the parameters under a lock, compute, update them under the lock.

    Views are consistent and updates are totally ordered; workers wait for each other when they read and when they write.

    Costs per step: one copy of the parameters, two acquisitions of the lock; one extra vector per worker.
    Clipping acts on the worker's own gradient, which is the update.
    Use when: the update is short compared to the gradient, and a simple, exact order of updates matters.
    Not: `lockstep`, which waits for all workers after every step.

    Args:
        kind: `mutex`, or `rwlock`: a read-write lock with writer preference, under which copies do not exclude each other.
        backoff: with a back-off, workers do not queue: they try the lock and wait that long after each failure.
        step_size: factor on each gradient by its staleness; works with SGD, not with Adam.

    Differs from the paper: any optimizer can step under the lock, not only plain SGD. Back-off and a factor by staleness are
    optional; by default workers queue at the lock, as published.

    Reference: AsyncSGD of Bäckström et al., 2021, arXiv:2102.09032; the read-write lock after Ek, "Asynchronous Parallel
        Stochastic Gradient Descent", Chalmers 2021.
    """

    kind: Literal["mutex", "rwlock"] = "mutex"
    backoff: Backoff = field(default_factory=NoBackoff)
    step_size: StepSize = field(default_factory=FullStep)

    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")

    @property
    def needs(self) -> Needs:
        return Needs("locked", lock=self.kind, staleness_counts=self.step_size.needs_counts)

    @property
    def waits_for(self) -> WaitsFor:
        return "lock"

    def unrecorded(self, num_workers: int) -> str:
        return self.step_size.unrecorded if num_workers > 1 else ""

    def weighting(self, num_workers: int) -> str:
        return self.step_size.option

    def work(self, replica: Replica, ports: Ports[LockedParameters]) -> None:
        """x: this worker's copy of the parameters (P,); tau: staleness."""
        shared = ports.shared
        if self.backoff != NoBackoff():
            shared.backoff = lambda failures: self.backoff.units(failures + 1, ports.random) * replica.update_time_s
        for _ in replica.steps():
            with shared.reading():
                read_version = shared.version
                x = replica.copy(shared.x)
            replica.gradient(at=x, version=read_version)
            ready_version = shared.version
            with shared.writing():
                tau = shared.version - read_version
                replica.apply(to=shared.x, weight=self.step_size.weight(tau, ports))
                replica.applied(shared.advance(), gradient_version=ready_version)
