"""Local SGD: everyone trains alone and all average their parameters every H steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.algorithms.agreed_gradient import AgreedGradient
from paceline.algorithms.base import Algorithm
from paceline.algorithms.same_rounds import SameRounds
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters
from paceline.specs.bounds import COUNT, COUNT_FROM_0

__all__ = ["LocalSGD"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Algorithm):
    """Local SGD: H steps on a model of one's own, then the average of all models, in lockstep.

    Costs per step: 1/H of an all-reduce of the parameters. Every H steps all wait for the slowest.
    Clipping acts on the worker's own gradient, which its own model takes; in the warm-up, on each before the mean of all.
    Use when: workers are equally fast and communication is the bottleneck.
    Not: `lockstep` and `all-reduce`, which average every gradient; `ad-psgd`, which waits for nobody. DiLoCo is local SGD with
    an outer optimizer on the averaged change.

    Args:
        period: H, steps between two averages of the parameters.
        warmup_steps: so many steps average every gradient instead, as all-reduce does: post-local SGD.

    Differs from the paper: the optimizer's state, such as momentum, stays each worker's own and is not averaged.

    Reference: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv:1808.07217; the warm-up is theirs and
        PyTorch's `PostLocalSGDState`.
    """

    period: Annotated[int, COUNT] = 8
    warmup_steps: Annotated[int, COUNT_FROM_0] = 0

    lockstep: ClassVar[bool] = True

    @property
    def clips_before_the_mean(self) -> bool:
        """In the warm-up."""
        return self.warmup_steps > 0

    @property
    def needs(self) -> Needs:
        """A replica per worker, and all-reduce."""
        return Needs("replicated", collectives=True, own_models=True)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), k: steps made."""
        assert ports.collectives is not None
        shared, rounds = ports.shared, SameRounds(replica, ports)
        gradient = AgreedGradient(replica, ports)
        for _ in replica.steps():
            k = shared.version
            warms_up = k < self.warmup_steps
            replica.gradient(at=shared.x, version=k)
            if warms_up:
                gradient.average(weight=replica.samples)
            if warms_up or replica.samples:  # alone and without a batch, a worker makes no step
                with shared.writing():
                    replica.apply(to=shared.x)
            if not warms_up and (k + 1) % self.period == 0 and ports.num_workers > 1:
                mean = replica.copy(shared.x)
                rounds.meet_after(ports.collectives.all_reduce_mean(mean, 1.0, number=float(rounds.surprised())))
                with shared.writing():
                    shared.x.copy_(mean)
                    ports.moved(2)
                ports.counts.averages += 1
            if replica.samples:
                replica.applied(shared.advance(), gradient_version=k)
            else:
                replica.absent(shared.advance(updates=0))
