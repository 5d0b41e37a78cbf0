"""Leashed-SGD: consistent, lock-free updates by publishing whole vectors with one compare-and-swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from paceline.algorithms.backoff import Backoff, NoBackoff
from paceline.algorithms.base import Algorithm
from paceline.algorithms.step_size import FullStep, StepSize
from paceline.optim.settings import check_stateless
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, SlotParameters
from paceline.specs.bounds import COUNT_FROM_0


@dataclass(frozen=True, kw_only=True)
class Leashed(Algorithm):
    """Leashed-SGD: compute in place on an immutable vector, publish a new one, retry if another worker was faster.

    A published vector is never written again, so every gradient is computed at one consistent version, without a copy. Updates
    are totally ordered by the compare-and-swap that publishes them; one fails only because another succeeded.

    Costs per step: one copy-and-update of the parameters, and one more for every lost race; at most 3 m vectors for m workers,
    gradients included, allocated when first needed.
    Clipping acts on the worker's own gradient, which is the update.
    Use when: many workers, dense gradients, and steps longer than updates.
    Not: `hogwild`, whose views may be torn and whose racing writes may cancel.

    Args:
        persistence: T_p, how many lost races a worker retries before it drops its gradient. None: it never gives up; 0: a
            single attempt, so that staleness does not grow after the gradient is ready. Only SGD without momentum allows a
            number: other optimizers would keep dropped gradients in their state.
        backoff: wait between attempts, in update times.
        step_size: factor on each gradient by its staleness at the first attempt; works with SGD, not with Adam.

    Differs from the paper: vectors are recycled in a fixed pool (version-tagged head, one hazard word per worker) instead of
    freed; a retry re-publishes the newest vector plus the update that the optimizer made on the first attempt, so that an
    optimizer with state steps once. For plain SGD that is the paper's update, up to rounding.

    Reference: Bäckström, Walulya, Papatriantafilou, Tsigas, "Consistent Lock-free Parallel Stochastic Gradient Descent for
        Fast and Stable Convergence", IPDPS 2021, arXiv:2102.09032, Algorithm 3.
    """

    persistence: Annotated[int, COUNT_FROM_0] | None = None
    backoff: Backoff = field(default_factory=NoBackoff)
    step_size: StepSize = field(default_factory=FullStep)

    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")

    @property
    def needs(self) -> Needs:
        return Needs("slots", staleness_counts=self.step_size.needs_counts)

    def unrecorded(self, num_workers: int) -> str:
        if num_workers == 1:
            return ""
        return self.step_size.unrecorded if self.persistence is None else "the instants at which gradients were dropped"

    def weighting(self, num_workers: int) -> str:
        return self.step_size.option

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], num_workers: int) -> None:
        """With a persistence, a dropped update must not stay in the optimizer's state."""
        super().check_optimizers(optimizers, num_workers)
        if self.persistence is not None and num_workers > 1:
            check_stateless(optimizers, f"leashed(persistence={self.persistence})")

    def work(self, replica: Replica, ports: Ports[SlotParameters]) -> None:
        """x: a published vector (P,)."""
        pool = ports.shared
        for _ in replica.steps():
            view = pool.latest()
            try:
                x = replica.copy(view.x) if replica.moves else view.x
                replica.gradient(at=x, version=view.version)
            finally:  # a loop may end here, between a forward pass and the step that never comes
                pool.leave()
            self._publish(replica, ports, read_version=view.version)

    def _publish(self, replica: Replica, ports: Ports[SlotParameters], read_version: int) -> None:
        """The LAU-SPC loop: load the newest, add the update, single-pointer compare-and-swap."""
        pool = ports.shared
        new = pool.claim()
        latest = pool.latest()
        ready_version = latest.version
        replica.apply(to=new.x, of=latest.x, weight=self.step_size.weight(ready_version - read_version, ports))
        failed_publishes, update = 0, new.x
        while not pool.publish(new, after=latest):
            failed_publishes += 1
            if self.persistence is not None and failed_publishes > self.persistence:
                pool.discard(new)
                pool.leave()
                replica.dropped(gradient_version=ready_version, failed_publishes=failed_publishes)
                return
            if failed_publishes == 1:
                update = replica.update_since(before=latest.x, after=new.x)  # `latest` is still protected
            pool.leave()
            wait_units = self.backoff.units(failed_publishes, ports.random)
            if wait_units:
                ports.clock.sleep_s(wait_units * replica.update_time_s)
            latest = pool.latest()
            torch.add(latest.x, update, out=new.x)
            ports.moved(3)
        pool.leave()
        replica.applied(latest.version + 1, gradient_version=ready_version, failed_publishes=failed_publishes)
