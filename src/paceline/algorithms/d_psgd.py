"""D-PSGD: every worker averages with its neighbours, then steps; in lockstep with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from paceline.algorithms.base import Algorithm
from paceline.algorithms.same_rounds import check_rates, left_out
from paceline.algorithms.topology import Ring, Topology, metropolis_weights
from paceline.compression.carriers import GOSSIP
from paceline.errors import NoGradient, PeerLostError, WorkerLostError
from paceline.optim.half_types import to_sum_type
from paceline.ports.checks import MalformedMessageError, checked_vector, checked_weight
from paceline.ports.ports import Mailbox, Message, PeerBack, PeerLeft, Ports, Received
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters
from paceline.specs.bounds import SECONDS_ABOVE_0

__all__ = ["DPSGD"]


@dataclass(frozen=True, kw_only=True)
class DPSGD(Algorithm):
    """Decentralized parallel SGD: x_i <- sum_j W_ij x_j - learning rate * g(x_i), in lockstep with the neighbours.

    Every worker has its own model; evaluation uses the mean of all models. Models travel while the gradient is computed.

    Costs per step: one message of the parameters' size to and from every neighbour; a round takes as long as the slowest
    neighbour's, and so, after as many rounds as the graph's diameter, as the slowest worker's.
    Clipping acts on the worker's own gradient, before its local step.
    Use when: links are slow or a central point would be the bottleneck, and workers are equally fast.
    Not: `ad-psgd`, which never waits; `lockstep` and `all-reduce`, whose workers hold equal models.

    Args:
        topology: which workers average with each other, with Metropolis weights; a time-varying one changes every step.
        deadline_s: how long a round may wait for one neighbour.

    Differs from the paper: mixing weights are not arguments but the Metropolis weights of the topology, which may change
    every step. In a round without a batch a worker averages and does not step.

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
        Parallel Stochastic Gradient Descent", NIPS 2017, arXiv:1705.09056, Algorithm 1.
    """

    topology: Topology = field(default_factory=Ring)
    deadline_s: Annotated[float, SECONDS_ABOVE_0] = 60.0

    refused_arguments: ClassVar[Mapping[str, str]] = {"codec": GOSSIP}
    lockstep: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs("replicated", mailbox=True, own_models=True)

    @property
    def patience_s(self) -> float:
        return self.deadline_s

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        self.topology.check(num_workers)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), k: the round, W: mixing weights by worker."""
        assert ports.mailbox is not None
        shared, mailbox, me, n = ports.shared, ports.mailbox, ports.worker_id, ports.num_workers
        for _ in replica.steps():
            x, k, round_ = shared.x, shared.version, replica.round or 0
            rates = float(replica.rates) if replica.round is not None else 0.0
            W = metropolis_weights(self.topology, me, n, k)
            for reader in self.topology.sends_to(me, n, k):
                self._send(reader, Message("model", k, rates, x, version=round_), mailbox)
            with suppress(NoGradient):  # the neighbours still need this worker's model in this round
                replica.gradient(at=x, version=k)
            neighbours = {j: self._model_of(j, k, x, (round_, rates), ports) for j in sorted(W) if j != me}
            with shared.writing():
                mixed = to_sum_type(x)
                mixed.mul_(W[me])
                for j, x_j in neighbours.items():
                    mixed.add_(x_j, alpha=W[j])
                if mixed is not x:
                    x.copy_(mixed)
                ports.moved(2 + 3 * len(neighbours))
                ports.counts.averages += bool(neighbours)
                if replica.samples:
                    replica.apply(to=x)
                    replica.applied(shared.advance(), gradient_version=k)
                else:  # this worker has no batch in this round and only averages
                    replica.absent(shared.advance(updates=0))

    def _model_of(
        self, j: int, k: int, x: torch.Tensor, place: tuple[int, float], ports: Ports[ReplicatedParameters]
    ) -> torch.Tensor:
        """The model (P,) that neighbour `j` had at the beginning of round `k`.

        Args:
            j: the neighbour.
            k: steps that both have made.
            x: this worker's model.
            place: its round of batches and digest of learning rates, which the neighbour's must equal.
            ports: of its program.

        Raises:
            UsageError: the rounds or rates differ.
        """
        round_, rates = place
        assert ports.mailbox is not None
        while True:
            match ports.mailbox.receive(self.deadline_s, kind="model", sender=j, number=k):
                case None:
                    raise self._lost(j, k, f"did not send its model within {self.deadline_s:g} s")
                case PeerLeft(reason=reason):
                    raise self._lost(j, k, f"did not send its model: it has left ({reason})")
                case Received() as received:
                    try:
                        x_j = checked_vector(received, x)
                        if (other := received.message.version) != round_:
                            raise left_out([j if other > round_ else ports.worker_id], k)
                        check_rates([rates, checked_weight(received)], k + 1)
                        return x_j
                    except MalformedMessageError:  # the right one may follow
                        ports.counts.peer_failures += 1
                case PeerBack():
                    pass

    def _send(self, reader: int, message: Message, mailbox: Mailbox) -> None:
        try:
            mailbox.send(reader, message)
        except PeerLostError as error:
            raise self._lost(reader, message.number, f"did not take a model: {error}") from error

    def _lost(self, worker: int, k: int, what: str) -> WorkerLostError:
        return WorkerLostError(
            f"D-PSGD round {k + 1}: worker {worker} {what.rstrip('.')}. Resume from the newest checkpoint with "
            "--resume, or use ad-psgd, which continues without a lost worker."
        )
