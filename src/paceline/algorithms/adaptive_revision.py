"""AdaptiveRevision: an asynchronous parameter server whose AdaGrad corrects steps that overlapped with late gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.algorithms.parameter_server import ParameterServer
from paceline.algorithms.server import adaptive_revision as rule
from paceline.algorithms.server.modes import Async
from paceline.algorithms.server.served import Durability, Served
from paceline.ports.ports import Ports, ServerPorts
from paceline.ports.replica import Replica
from paceline.ports.shared import ServedParameters
from paceline.specs.bounds import ABOVE_0, SECONDS, SERVERS


@dataclass(frozen=True, kw_only=True)
class AdaptiveRevision(Served):
    """AdaptiveRevision: asynchronous workers, and servers whose AdaGrad compensates for each gradient's delay.

    A server knows which gradients it has applied since a worker read the parameters. If a late gradient agrees with them,
    their steps together went too far: rates fall, and past steps are corrected. If they contradict each other, the delay does
    no harm, and rates stay. Without delay, and so with one worker, it is AdaGrad whose sums start at 1. Without a launcher a
    loop is plain PyTorch: this rule does not run.

    Costs per step: every worker sends a gradient and receives the parameters, and as much again for the sum of gradients that
    travels with them (`echo`); or a vector at the server for each version that a worker may still answer (`snapshot`). Three
    vectors of state at the servers.
    Clipping acts on the worker's own gradient, which is the update.
    Use when: hundreds of workers, or slow ones, make gradients hundreds of updates late, above all with sparse features.
    When N doubles: staleness doubles, and the best alpha hardly changes.
    Not: `downpour`, whose AdaGrad treats late gradients as fresh; `parameter-server(mode=async)`, where the user's optimizer
    applies them.

    Args:
        alpha: the factor on every rate; None: the learning rate of the run, with its schedule. A rate that suits SGD suits it,
            as the sums start at 1.
        shards: servers, each with a contiguous part of the vector.
        revision_state: where to keep the sum of gradients at a worker's read: at the worker (`echo`) or at the server
            (`snapshot`), which refuses gradients whose snapshot died with its predecessor.
        durability: what survives a dead server, as in `parameter-server`: its last `snapshot`, or a `replica` of its shard.
        snapshot_s: for `snapshot`: seconds between snapshots of a server's state.

    Differs from the paper: the server keeps snapshots per worker, so it can free those of a dead worker.

    Reference: McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online Learning", NIPS 2014.
    """

    alpha: Annotated[float, ABOVE_0] | None = None
    shards: Annotated[int, SERVERS] = 1
    revision_state: Literal["echo", "snapshot"] = "echo"
    durability: Durability = "snapshot"
    snapshot_s: Annotated[float, SECONDS] = 5.0

    of_servers: ClassVar[tuple[str, ...]] = ("shards", "durability", "snapshot_s")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._server()  # checks the rest

    def work(self, replica: Replica, ports: Ports[ServedParameters]) -> None:
        """As `parameter-server(mode=async)`; only the servers' rule differs."""
        self._server().work(replica, ports)

    def serve(self, shard_id: int, ports: ServerPorts) -> None:
        self._server().serve(shard_id, ports)

    @property
    def server_rule(self) -> rule.AdaptiveRevision:
        return rule.AdaptiveRevision(alpha=self.alpha, revision_state=self.revision_state)

    @property
    def notices_deaths(self) -> bool:
        """With snapshots: a server discards a dead worker's, at an instant that no record has."""
        return self.revision_state == "snapshot"

    def unrecorded(self, num_workers: int) -> str:
        return self._server().unrecorded(num_workers)

    def _server(self) -> ParameterServer:
        return ParameterServer(
            mode=Async(),
            shards=self.shards,
            apply=self.server_rule,
            durability=self.durability,
            snapshot_s=self.snapshot_s,
        )
