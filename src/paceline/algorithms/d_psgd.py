"""D-PSGD: every worker averages with its neighbours, then steps; in lockstep with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from paceline.algorithms.base import Algorithm, WaitsFor
from paceline.algorithms.equal_replicas import check_rates
from paceline.algorithms.replacements import Replacements
from paceline.algorithms.round import left_out
from paceline.algorithms.topology import Ring, Topology, metropolis_weights
from paceline.compression.registry import GOSSIP
from paceline.errors import NoGradient, PeerLostError, UsageError, WorkerLostError
from paceline.optim.half_types import to_sum_type
from paceline.ports.checks import MalformedMessageError, checked_vector, checked_weight
from paceline.ports.ports import Message, PeerBack, PeerLeft, Ports, Received
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ReplicatedParameters
from paceline.ports.views import LOST, MODEL
from paceline.records.order import NONE
from paceline.specs.bounds import SECONDS_ABOVE_0

_ROUNDS_BETWEEN_LOOKS = 64  # at which steps no death can lose any more
_LOOKS, _LOOK_EVERY_S = 100, 0.05  # for the connection to a newcomer


@dataclass(frozen=True, kw_only=True)
class DPSGD(Algorithm):
    """Decentralized parallel SGD: x_i <- sum_j W_ij x_j - learning rate * g(x_i), in lockstep with the neighbours.

    Every worker has its own model; evaluation uses the mean of all models. Models travel while the gradient is computed.

    If a worker dies, its model is lost. The others keep its steps that are in models that it sent, and train on the batches of
    its later steps. A replacement starts with a copy of the first survivor's model.

    Costs per step: one message of the parameters' size to and from every neighbour; a round takes as long as the slowest
    neighbour's, and so, after as many rounds as the graph's diameter, as the slowest worker's.
    Clipping acts on the worker's own gradient, before its local step.
    Use when: links are slow or a central point would be the bottleneck, and workers are equally fast.
    Not: `ad-psgd`, which never waits; `lockstep` and `all-reduce`, whose workers hold equal models.

    Args:
        topology: which workers average with each other, with Metropolis weights; a time-varying one changes every step.
        deadline_s: how long a round may wait for one neighbour.

    Differs from the paper: dead workers are left out. In rounds that have begun, a worker uses its own model in place of a
    missing one. Later rounds use the topology of the living workers, or a ring if theirs does not exist at that size. A
    replacement becomes part of the topology again.
    Mixing weights are not arguments but the Metropolis weights of the topology, which may change every step. In a round
    without a batch a worker averages and does not step.

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized
        Parallel Stochastic Gradient Descent", NIPS 2017, arXiv:1705.09056, Algorithm 1.
    """

    topology: Topology = field(default_factory=Ring)
    deadline_s: Annotated[float, SECONDS_ABOVE_0] = 60.0

    refused_arguments: ClassVar[Mapping[str, str]] = {"codec": GOSSIP}
    tolerates: ClassVar[tuple[str, ...]] = ("kill under launch",)
    lockstep: ClassVar[bool] = True

    @property
    def waits_for(self) -> WaitsFor:
        return "neighbours"

    @property
    def survivors_continue(self) -> bool:
        return True

    @property
    def needs(self) -> Needs:
        return Needs("replicated", mailbox=True, own_models=True, views=True, order=True)

    @property
    def patience_s(self) -> float:
        return self.deadline_s

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        self.topology.check(num_workers)

    def caution(self, num_workers: int, delay: int | None = None) -> str:
        return self.topology.caution(num_workers)

    def work(self, replica: Replica, ports: Ports[ReplicatedParameters]) -> None:
        """x: this worker's parameters (P,), k: the round, W: mixing weights by worker."""
        shared, me, views = ports.shared, ports.worker_id, ports.views
        replacements = Replacements(replica, ports)
        neighbours = _Neighbours(replica, ports, self.deadline_s, replacements)
        replacements.parts.append(neighbours)
        for _ in replacements.steps():
            x, k, batches = shared.x, shared.version, neighbours.batches
            rates = float(replica.rates) if replica.round is not None else 0.0
            members = views.begin(k) if views is not None else range(ports.num_workers)
            if views is None:
                replica.meet(members, batches)
            elif len(members) < replacements.num_members or k % _ROUNDS_BETWEEN_LOOKS == 0:
                replica.meet(members, min(map(views.kept, members)))
            replacements.num_members = len(members)
            readers, W = self._neighbours_of(me, members, k, ports.num_workers)
            for reader in readers:
                neighbours.send(reader, Message(MODEL, k, rates, x, version=batches))
            if views is not None:
                views.sent(batches)
                replacements.announce()
            with suppress(NoGradient):  # the neighbours still need this worker's model in this round
                replica.gradient(at=x, version=k)
            received = {j: neighbours.model_of(j, k, x, (batches, rates)) for j in sorted(W) if j != me}
            models = {j: x_j for j, x_j in received.items() if x_j is not None}
            for j in received.keys() - models.keys():
                ports.decided(k, peer=j, at=k, of=NONE, peer_incarnation=replacements.incarnations.get(j, 0))
            with shared.writing():
                mixed = to_sum_type(x)
                mixed.mul_(W[me] + sum(W[j] for j in received if j not in models))
                for j, x_j in models.items():
                    mixed.add_(x_j, alpha=W[j])
                if mixed is not x:
                    x.copy_(mixed)
                ports.moved(2 + 3 * len(models))
                ports.counts.averages += bool(models)
                if replica.samples:
                    replica.apply(to=x)
                    replica.applied(shared.advance(), gradient_version=k)
                else:  # this worker has no batch in this round and only averages
                    replica.absent(shared.advance(updates=0))
            neighbours.batches = replica.rounds_begun

    def _neighbours_of(
        self, me: int, members: Sequence[int], k: int, num_workers: int
    ) -> tuple[Sequence[int], dict[int, float]]:
        """The workers that get this one's model in round `k`, and the mixing weights of those whose models it gets."""
        topology, m = self.topology, len(members)
        if m == num_workers:
            return topology.sends_to(me, m, k), metropolis_weights(topology, me, m, k)
        place = members.index(me)
        try:
            topology.check(m)
        except UsageError:
            topology = Ring()
        W = {members[j]: weight for j, weight in metropolis_weights(topology, place, m, k).items()}
        return [members[j] for j in topology.sends_to(place, m, k)], W


class _Neighbours:
    """Sends a worker's model to its neighbours, and receives theirs. A `Part` of the program."""

    def __init__(
        self, replica: Replica, ports: Ports[ReplicatedParameters], deadline_s: float, replacements: Replacements
    ) -> None:
        assert ports.mailbox is not None
        self._replica, self._ports, self._mailbox, self._deadline_s = replica, ports, ports.mailbox, deadline_s
        self._replacements = replacements  # of dead workers
        self._gone: set[int] = set()  # dead neighbours whose last message has come
        self._connected: dict[int, int | None] = {}  # newcomers that it has waited for, with their incarnations
        self.batches = 0  # rounds of batches, up to the last step

    # For newcomers

    def for_newcomers(self) -> dict[str, Any]:
        """As of `Part`. Waits until all workers are between the same two rounds."""
        views = self._ports.views
        assert views is not None
        members = views.living()
        self._replica.meet(members, min(map(views.kept, members)))
        self._gone.intersection_update(members)
        return {"giver": self._ports.worker_id, "batches": self.batches}

    def enter(self, given: dict[str, Any]) -> None:
        self.batches = given["batches"]
        assert self._ports.views is not None
        self._ports.views.got(given["giver"], self.batches)

    # Models

    def send(self, reader: int, message: Message) -> None:
        try:
            self._mailbox.send(reader, message)
        except PeerLostError as error:
            if self._connects(reader):
                self.send(reader, message)
            elif not self._has_died(reader):  # what it has sent may still arrive
                raise _lost(reader, message.number, f"did not take a model: {error}") from error

    def _connects(self, worker: int) -> bool:
        """Whether a newcomer can be reached soon: it asks as soon as it is connected, which others learn a moment later."""
        incarnation = self._replacements.incarnations.get(worker)
        if incarnation == self._connected.get(worker):
            return False
        self._connected[worker] = incarnation
        for _ in range(_LOOKS):
            if worker in self._mailbox.peers():
                return True
            self._mailbox.receive(_LOOK_EVERY_S, kind=(), sender=self._ports.worker_id)  # which gets no such message
        return False

    def model_of(self, j: int, k: int, x: torch.Tensor, place: tuple[int, float]) -> torch.Tensor | None:
        """The model (P,) that neighbour `j` had at the beginning of round `k`; None: it will not come.

        Args:
            j: the neighbour.
            k: steps that both have made.
            x: this worker's model.
            place: its rounds of batches so far and digest of learning rates, which the neighbour's must equal.

        Raises:
            UsageError: the rounds or rates differ.
        """
        batches, rates = place
        while True:
            deadline_s = 0.0 if j in self._gone else self._deadline_s
            match self._mailbox.receive(deadline_s, kind=(MODEL, LOST), sender=j, number=k):
                case None if j in self._gone:
                    return None
                case PeerLeft(incarnation=incarnation) if incarnation < self._replacements.incarnations.get(j, 0):
                    pass
                case PeerLeft() if self._has_died(j):
                    self._gone.add(j)
                    return None
                case None:
                    raise _lost(j, k, f"did not send its model within {self._deadline_s:g} s")
                case PeerLeft(reason=reason):
                    raise _lost(j, k, f"did not send its model: it has left ({reason})")
                case Received(message=Message(kind=kind)) if kind == LOST:
                    return None
                case Received() as received:
                    try:
                        x_j = checked_vector(received, x)
                        if (other := received.message.version) != batches:
                            raise left_out([j if other > batches else self._ports.worker_id], k)
                        check_rates([rates, checked_weight(received)], k + 1)
                        return x_j
                    except MalformedMessageError:  # the right one may follow
                        self._ports.counts.peer_failures += 1
                    except UsageError:
                        if self._replacements.leaves_out(j, k):
                            return None
                        raise
                case PeerBack():
                    pass

    def _has_died(self, worker: int) -> bool:
        return self._ports.views is not None and self._ports.views.has_died(worker)


def _lost(worker: int, k: int, what: str) -> WorkerLostError:
    return WorkerLostError(
        f"D-PSGD round {k + 1}: worker {worker} {what.rstrip('.')}. If it is only slow, raise deadline_s; else resume "
        "from the newest checkpoint, or use ad-psgd, which never waits."
    )
