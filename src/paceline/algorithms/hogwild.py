"""Hogwild!: all workers read and write the shared parameters at the same time, without locks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.algorithms.base import Algorithm
from paceline.algorithms.step_size import FullStep, StepSize
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, RacingParameters


@dataclass(frozen=True, kw_only=True)
class Hogwild(Algorithm):
    """Hogwild!: racing component-wise updates of one shared vector.

    Costs per step: nothing beyond the user's own step, except that the caches of all workers hold the same vector. Views can
    be torn: partly older, partly newer than their version says.
    Clipping acts on the worker's own gradient, which is the update.
    Use when: gradients are sparse, or steps are long compared to updates.
    Not: `leashed`, whose workers never see a torn vector and never lose a component.

    Args:
        reads: compute the gradient on the `live` vector (it may change under the forward pass) or on a private `copy`. If a
            loop moves parameters during a step, its worker switches to a copy, with a warning.
        step_size: factor on each gradient by its staleness; works with SGD, not with Adam.

    Differs from the paper: the paper assumes that each addition to a component is atomic. Here an update is a vectorised
    read-modify-write: if two workers write one component at the same instant, one addition can be lost. The update is as
    dense as the gradient; `paceline.sklearn` has kernels that write only the components of a sparse example.

    Reference: Niu et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", 2011,
        arXiv:1106.5730, Algorithm 1. `reads=copy` is HOG of Bäckström et al., 2021, arXiv:2102.09032.
    """

    reads: Literal["live", "copy"] = "live"
    step_size: StepSize = field(default_factory=FullStep)

    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")

    @property
    def needs(self) -> Needs:
        return Needs("racing", staleness_counts=self.step_size.needs_counts)

    def unrecorded(self, num_workers: int) -> str:
        return "the order in which workers wrote single elements" if num_workers > 1 else ""

    def weighting(self, num_workers: int) -> str:
        return self.step_size.option

    def work(self, replica: Replica, ports: Ports[RacingParameters]) -> None:
        """x: shared parameters (P,); tau: staleness as it stands when the update begins."""
        shared = ports.shared
        for _ in replica.steps():
            read_version = shared.version
            x = replica.copy(shared.x) if self.reads == "copy" or replica.moves else shared.x
            replica.gradient(at=x, version=read_version)
            ready_version = shared.version
            tau = ready_version - read_version
            with shared.writing():
                replica.apply(to=shared.x, weight=self.step_size.weight(tau, ports))
                replica.applied(shared.advance(), gradient_version=ready_version)
