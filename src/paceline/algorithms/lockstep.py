"""Synchronous SGD on one machine: a barrier after every step, and the average of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.algorithms.agreed_gradient import AgreedGradient
from paceline.algorithms.base import Algorithm
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters

__all__ = ["Lockstep"]


@dataclass(frozen=True, kw_only=True)
class Lockstep(Algorithm):
    """Synchronous SGD: every worker computes a gradient, all wait, all apply the average.

    A round of m workers is one update with a batch of m times the batch size, and never stale. Every worker keeps its own
    replica and optimizer; equal gradients keep them equal, bit for bit. Averages weigh by samples, so a round in which some
    workers have no batch left equals one big batch as well.

    Costs per step: one gradient written and one average read through shared memory (2 P elements), two barriers; one extra
    vector per worker. Every round lasts as long as its slowest worker.
    Clipping acts on each worker's own gradient, before the mean of all: with it, a round is not one step with the large batch,
    which would clip the mean. For that take `all-reduce`; a `ClippingWarning` says so.
    Use when: workers are equally fast and results must not depend on timing.
    Not: `locked`, where each worker applies its own gradient and nobody waits for a round to fill.

    Differs from the paper: there a master applies the average and the others copy the result; here every worker applies it to
    its own replica.

    Reference: SyncSGD of Bäckström et al., "Consistent Lock-free Parallel Stochastic Gradient Descent for Fast and Stable
        Convergence", IPDPS 2021, arXiv:2102.09032.
    """

    lockstep: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """A replica per worker."""
        return Needs("replicated", collectives=True)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), g: its gradient, then the average of all (P,)."""
        shared, gradient = ports.shared, AgreedGradient(replica, ports)
        for _ in replica.steps():
            version = shared.version
            replica.gradient(at=shared.x, version=version)
            gradient.average(weight=replica.samples)
            with shared.writing():
                replica.apply(to=shared.x)
                replica.applied(shared.advance(), gradient_version=version)
