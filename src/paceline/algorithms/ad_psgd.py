"""AD-PSGD: workers train at their own pace and average in pairs in the background."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.algorithms.base import Algorithm
from paceline.algorithms.pairwise import PairwiseAveraging
from paceline.algorithms.topology import Ring, Topology
from paceline.compression.registry import GOSSIP
from paceline.errors import NoGradient
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Algorithm):
    """Asynchronous decentralized parallel SGD: average with one neighbour, then apply the (by then stale) gradient.

    Every worker has its own model and two programs: one computes gradients while the other averages with a neighbour. No
    worker waits for a slow one. Evaluation uses the mean of all models.

    Every gradient requests one pairwise average. `averages_per_step` in the result is the number of averages a worker takes
    part in per gradient. A pair's average counts at both workers, so this is 2 if exchanges are faster than gradients. A
    worker begins one average at a time; requests made meanwhile count as one. So it is 1 if an exchange takes as long as a
    gradient, and 0.5 if it takes twice as long.

    Fast workers make more of the updates: with workers i at rates p_i, training minimises sum_i p_i f_i. With shared data all
    f_i are equal; with a partition, see `share_of_updates` in the result.

    Costs per step: one request and one answer of the parameters' size, overlapped with the gradient; three private copies of
    the parameters, and one more for each late answer, four at most.
    Clipping acts on the worker's own gradient, before its local step.
    Use when: workers, links or machines are unequal, shared or unreliable.
    Not: `d-psgd`, which averages with all neighbours and waits for them; `hogwild`, whose workers share one vector.

    Args:
        topology: which workers may average with each other. Bipartite ones (even rings, bipartite-exponential) need no
            refusals.
        peers: draw partners at `random`, as in the paper, or take turns (`rotate`).

    Differs from the paper: its passive workers never start an average; here they invite an active neighbour, so that every
    worker's gradient requests one. The second half of an average is applied as a difference, so that gradients can be applied
    in between; `exchange.py` shows why only gradients change the sum of all models, however late that half arrives. After its
    last gradient a worker averages once more, if a neighbour is left.

    Reference: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv:1710.06952,
        Algorithm 1.
    """

    topology: Topology = field(default_factory=Ring)
    peers: Literal["random", "rotate"] = "random"

    refused_arguments: ClassVar[Mapping[str, str]] = {"codec": GOSSIP}
    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")

    @property
    def needs(self) -> Needs:
        return Needs("replicated", mailbox=True, own_models=True, order=True)

    def unrecorded(self, num_workers: int) -> str:
        return ""

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        self.topology.check(num_workers)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), which its two programs share under a lock; z: the copy for the gradient."""
        assert ports.concurrency is not None
        shared, lock = ports.shared, ports.concurrency.lock()
        averaging = PairwiseAveraging(self.topology, self.peers, ports, lock)
        if ports.incarnation:
            averaging.take_model()
        with averaging.in_background(ports.concurrency), suppress(NoGradient):
            for _ in replica.steps():
                with lock:
                    version = shared.version
                    z = replica.copy(shared.x)
                averaging.turn()
                replica.gradient(at=z, version=version)
                ready_version = shared.version
                with lock, shared.writing():
                    replica.apply(to=shared.x)
                    replica.applied(shared.advance(), gradient_version=ready_version)
