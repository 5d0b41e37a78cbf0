"""Synchronous SGD on one machine: a barrier after every step, and the average of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.algorithms.agreed_gradient import AgreedGradient
from paceline.algorithms.base import Algorithm, Closures
from paceline.algorithms.evaluations import Evaluations
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
    Use when: workers are equally fast, or `shares=auto`, and results must not depend on timing.
    Not: `locked`, where each worker applies its own gradient and nobody waits for a round to fill.

    Args:
        shares: `equal` batches; or `auto`: every worker's is as large as the worker is fast, so that a round takes its samples
            divided by the sum of the speeds. Every 5 rounds all tell each other how long a sample takes them, in one small
            all-reduce, and cut the rounds that follow anew if that gains 5 % of their time, by about half or twice a batch at
            most. Not where most of a step does not grow with its batch, as of very small models: speeds say little there.
            Rounds have the same samples as before, and means weigh by samples: a step is the same up to rounding, where losses
            are means over samples.
            What depends on a worker's own batch changes with its size: BatchNorm's statistics, what dropout draws,
            losses that are sums, each worker's memory. No batch has less than one sample, and `batch_size` is the
            mean of all. For loops over `worker.batches` of a DataLoader with a `batch_size` and any sampler; tasks with the
            dynamic partition. A run's result has the sizes as `batch_sizes`.

    Differs from the paper: there a master applies the average and the others copy the result; here every worker applies it to
    its own replica.

    Reference: SyncSGD of Bäckström et al., "Consistent Lock-free Parallel Stochastic Gradient Descent for Fast and Stable
        Convergence", IPDPS 2021, arXiv:2102.09032.
    """

    shares: Literal["equal", "auto"] = "equal"

    lockstep: ClassVar[bool] = True

    @property
    def by_speed(self) -> bool:
        return self.shares == "auto"

    def closures(self, num_workers: int) -> Closures:
        """In rounds, as replicas are equal."""
        return "in rounds" if num_workers > 1 else "in place"

    @property
    def needs(self) -> Needs:
        return Needs("replicated", collectives=True)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), g: its gradient, then the average of all (P,)."""
        shared, gradient = ports.shared, AgreedGradient(replica, ports, by_speed=self.by_speed)
        replica.evaluations = Evaluations(ports, gradient.rounds, lambda: gradient.average(weight=replica.samples))
        for _ in gradient.steps():
            version = shared.version
            replica.gradient(at=shared.x, version=version)
            gradient.average(weight=replica.samples)
            with shared.writing():
                replica.apply(to=shared.x)
                replica.applied(shared.advance(), gradient_version=version)
