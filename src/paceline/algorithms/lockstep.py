"""Synchronous SGD on one machine: a barrier after every step, and the average of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.algorithms.base import Algorithm, Closures, Slow
from paceline.algorithms.evaluations import Evaluations
from paceline.algorithms.gradient_round import GradientRound
from paceline.algorithms.shares import waiting_less
from paceline.algorithms.table_mean import averaging
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters


@dataclass(frozen=True, kw_only=True)
class Lockstep(Algorithm):
    """Synchronous SGD: every worker computes a gradient, all wait, all apply the average.

    A round of m workers is one update with a batch of m times the batch size, and never stale. Every worker keeps its own
    replica and optimizer; equal gradients keep them equal, bit for bit. Averages are weighted by samples, so a round in which
    some workers have no batch left also equals one big batch.

    Costs per step: one gradient written and one average read through shared memory (2 P elements), two barriers; one extra
    vector per worker. Every round lasts as long as its slowest worker.
    Sparse gradients of embeddings: two small all-gathers more, and only the rows that any worker's gradient has are averaged.
    Clipping acts on each worker's own gradient, before the mean, so a round with clipping differs from one step with the large
    batch, which would clip the mean. `all-reduce` clips the mean; a `ClippingWarning` says so.
    Use when: workers are equally fast, or `shares=auto`, and results must not depend on timing.
    Not: `locked`, where each worker applies its own gradient without waiting for a round to fill.

    Args:
        shares: `equal` batches; or `auto`: batch sizes proportional to each worker's speed, so that a round takes its samples
            divided by the sum of the speeds. Every 5 rounds the workers share their time per sample, in one small
            all-reduce, and resize the batches if that saves 5 % of a round's time, by about half or twice at most. Not for
            very small models, whose step time hardly grows with the batch: measured speeds say little there.
            Rounds have the same samples as before, and means are weighted by samples: if losses are means over samples, a step
            is the same up to rounding.
            Batch-dependent results change with a worker's batch size: BatchNorm's statistics, dropout draws, losses that are
            sums, each worker's memory. A batch has at least one sample, and `batch_size` is the mean over workers. For loops
            over `worker.batches` of a DataLoader with a `batch_size` and any sampler; tasks with the dynamic partition. A
            run's result has the sizes as `batch_sizes`.

    Differs from the paper: there a master applies the average and the others copy the result; here every worker applies it to
    its own replica.

    Reference: SyncSGD of Bäckström et al., "Consistent Lock-free Parallel Stochastic Gradient Descent for Fast and Stable
        Convergence", IPDPS 2021, arXiv:2102.09032.
    """

    shares: Literal["equal", "auto"] = "equal"

    tolerates: ClassVar[tuple[str, ...]] = ("kill under launch",)
    lockstep: ClassVar[bool] = True

    @property
    def by_speed(self) -> bool:
        return self.shares == "auto"

    @property
    def survivors_continue(self) -> bool:
        return True

    def waiting_less(self, slow: Slow, num_workers: int) -> Algorithm | str | None:
        return waiting_less(self, slow)

    def closures(self, num_workers: int) -> Closures:
        """In rounds, as replicas are equal."""
        return "in rounds" if num_workers > 1 else "in place"

    @property
    def needs(self) -> Needs:
        return Needs("replicated", collectives=True, one_machine=True)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), g: its gradient, then the average of all (P,)."""
        shared, gradient = ports.shared, GradientRound(replica, ports, by_speed=self.by_speed)
        average = averaging(replica, ports, gradient)
        replica.evaluations = Evaluations(ports, gradient.round, average)
        for _ in gradient.steps():
            version = shared.version
            replica.gradient(at=shared.x, version=version)
            average()
            if gradient.is_void:
                replica.absent(version)
                continue
            with shared.writing():
                replica.apply(to=shared.x)
                replica.applied(shared.advance(), gradient_version=version)
