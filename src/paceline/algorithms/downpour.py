"""Downpour SGD: workers step locally, push accrued gradients and fetch parameters, each every few steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor, dtype

from paceline.algorithms.parameter_server import ParameterServer
from paceline.algorithms.server.adagrad import Adagrad
from paceline.algorithms.server.admission import WarmStart
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.client import Client
from paceline.algorithms.server.modes import Async
from paceline.algorithms.server.served import Durability, OnDeath, Served, ShardRules
from paceline.algorithms.server.standby import serve_shard
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.errors import NoGradient, UsageError
from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Selection, sum_selected, whole_but
from paceline.ports.ports import Ports, ServerPorts
from paceline.ports.replica import Replica
from paceline.ports.shared import ServedParameters
from paceline.specs.bounds import COUNT, COUNT_FROM_0, SECONDS, SERVERS


@dataclass(frozen=True, kw_only=True)
class Downpour(Served):
    """Downpour SGD: asynchronous workers step alone, push accrued gradients and fetch parameters, with AdaGrad at the servers.

    Between two fetches a worker's own optimizer steps on its own copy. A worker sends its accrued gradients as one sum, which
    makes one update; AdaGrad gives each parameter its own rate, which falls as its squared gradients add up.
    A single launched worker has no server: AdaGrad applies its gradients one by one. Without a launcher a loop is plain
    PyTorch: AdaGrad does not run. A worker that runs out of data pushes what it has accrued; a killed worker's accrued
    gradients are lost, and their samples not counted as trained.

    Costs per step: 1/push of a gradient sent and 1/fetch of the parameters received by every worker; one vector of AdaGrad's
    state at the servers, and one of accrued gradients per worker if push is above 1.
    Clipping acts on each of the worker's gradients, before they are accrued.
    With a tensor layout or a plan, several workers form a replica, and each part of the model has its own servers, `shards`
    of them.
    Use when: many workers are unequally fast, come and go, and one rate for all parameters makes training unstable.
    When N doubles: gradients are twice as stale; AdaGrad's rate can stay where a fixed one must fall. The default rate is
    0.01.
    Not: `parameter-server(mode=async)`, where every gradient is sent at once and the user's optimizer applies it; `local-sgd`,
    which averages models and waits for all.

    Args:
        fetch: n_fetch, steps between two fetches of the parameters.
        push: n_push, steps whose gradients are accrued and pushed together. Above `fetch`, fetched parameters lack what this
            worker has not yet pushed.
        overlap: let pushes and fetches travel while the worker computes its next gradient, as in the paper: parameters are
            then one step older, and the worker's own optimizer makes every step.
        apply: the servers' rule; `user` is the workers' own optimizer.
        warm_start_steps: the worker with the lowest id trains alone until the servers have applied this many of its steps; all
            others wait. If it dies, the next one takes over.
        shards: servers, each with a contiguous part of the vector.
        codec: compresses pushed gradients; a dead worker's error feedback is lost, as in `parameter-server`.
        on_death: after a worker's death, continue without it (`shrink`), wait for its successor if it died during the warm
            start (`wait`), or end the run (`fail`).
        durability: what survives a dead server, as in `parameter-server`: its last `snapshot`, or a `replica` of its shard.
        snapshot_s: for `snapshot`: seconds between a server's snapshots.

    Differs from the paper: unless `overlap`, a worker waits for the answers to fetches and pushes before its next gradient.
    With it, too, every push is applied once and its staleness is known. The paper's replicas step by plain SGD between
    fetches, and push their first gradient alone. The paper recommends a warm start with one replica, but specifies neither its
    length nor what the others do meanwhile.

    Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012: section 4.1, and the appendix's program of a
        replica.
    """

    fetch: Annotated[int, COUNT] = 1
    push: Annotated[int, COUNT] = 1
    overlap: bool = False
    apply: ApplyRule = field(default_factory=Adagrad)
    warm_start_steps: Annotated[int, COUNT_FROM_0] = 0
    shards: Annotated[int, SERVERS] = 1
    codec: Codec = field(default_factory=NoCodec)
    on_death: OnDeath = "shrink"
    durability: Durability = "snapshot"
    snapshot_s: Annotated[float, SECONDS] = 5.0

    serves_parts: ClassVar[bool] = True
    of_servers: ClassVar[tuple[str, ...]] = (
        "fetch", "push", "overlap", "warm_start_steps", "shards", "codec", "on_death", "durability", "snapshot_s",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_carrier(self.codec, "push", "downpour")
        if self.overlap and self.apply.echoes:
            raise UsageError(
                "With overlap=true the worker's sums of gradients are newer than the parameters of the gradient that it sends:"
                " take adaptive-revision(revision_state=snapshot), or leave out overlap."
            )
        self._plain_server()  # checks what both have

    @property
    def keeps_order(self) -> bool:
        return super().keeps_order or self.overlap or self.fetch > 1 or self.push > 1

    def unrecorded(self, num_workers: int) -> str:
        return self._plain_server().unrecorded(num_workers)

    def work(self, replica: Replica, ports: Ports[ServedParameters]) -> None:
        """x: this worker's copy of the parameters (P,); g: its gradient; accrued: the sum of those not yet pushed (P,)."""
        if not ports.num_servers:
            self._plain_server().work(replica, ports)
            return
        own_steps = self.fetch > 1 or self.overlap or not self.apply.overrides_optimizer
        client = Client(ports, self.codec, by_workers_optimizer=own_steps, fetched=ports.fetched)
        accrued = _Accrued(client.x, alone=self.push == 1 and not self.overlap, travels=self.overlap)
        if self._rules(ports.num_workers).takes_rows:
            replica.take_rows()
            # With overlap, the next gradient's lookups would come before the answers to pushes and fetches under way.
            client.follow(replica.lookups if self.apply.takes_lookups and not self.overlap else None)
        state = replica.optimizer_state()  # before steps of its own change it
        client.join()  # answered when the warm start is over, or to the worker that makes it
        try:
            with suppress(NoGradient):
                for step in replica.steps():
                    versions = client.versions
                    replica.gradient(at=client.x, version=client.version)
                    if (answer := client.finish()) is not None:  # the answer to what the last step has started
                        replica.settled(answer.applied_version)
                    ports.moved(accrued.add(replica.g, replica.rows, replica.samples, replica.missing))
                    pushes, fetches = step % self.push == 0, step % self.fetch == 0
                    if self.overlap or not fetches:
                        client.before_own_step(replica.rows)
                        replica.apply(to=client.x)  # the next gradient is computed where this one leads
                    if pushes:
                        replica.missing = accrued.missing
                        client.tell(self.settings_of(replica), lambda: state)
                    if pushes and self.overlap:
                        client.start_push(*accrued.take(), versions=versions, fetch=fetches)
                        replica.accrued()
                    elif pushes:
                        client.push(*accrued.take(), fetch=fetches).record(replica)
                    else:
                        if fetches:
                            client.start_fetch() if self.overlap else client.fetch()
                        replica.accrued()
            if (answer := client.finish()) is not None:
                replica.settled(answer.applied_version)
            if accrued.samples:
                replica.missing = accrued.missing
                client.tell(self.settings_of(replica), lambda: state)
                replica.settled(client.push(*accrued.take()).applied_version)
        finally:
            client.leave()

    def serve(self, shard_id: int, ports: ServerPorts) -> None:
        serve_shard(shard_id, self._rules(ports.num_workers), ports)

    def _rules(self, num_workers: int) -> ShardRules:
        warm_updates = -(-self.warm_start_steps // self.push)
        return ShardRules(
            admission=lambda _: WarmStart(warm_updates, range(num_workers)),
            apply=self.apply,
            codec=self.codec,
            on_death=self.on_death,
        )

    def _plain_server(self) -> ParameterServer:
        return ParameterServer(
            mode=Async(),
            shards=self.shards,
            apply=self.apply,
            codec=self.codec,
            durability=self.durability,
            snapshot_s=self.snapshot_s,
        )


class _Accrued:
    """The sum of the gradients not yet pushed, and their samples.

    Args:
        x: a vector (P,) like them.
        alone: each gradient is pushed separately, without a sum.
        travels: a sum is still being sent when the next begins.
    """

    def __init__(self, x: Tensor, *, alone: bool, travels: bool = False) -> None:
        self._x, self._alone, self._travels = x, alone, travels
        self._sum: Tensor | None = None
        self._selection: Selection | None = None  # the elements of the sum; None: all
        self._type: dtype | None = None  # of the gradients
        self.samples = 0
        self.missing: Ranges = ()  # parameters without a gradient in any of them

    def add(self, g: Tensor, rows: Rows | None, samples: int, missing: Ranges) -> float:
        """Adds a gradient (P,), or the elements that its rows select; returns the number of vectors read and written."""
        before, length = self._sum if self.samples else None, len(self._x)
        selection = None if rows is None else Selection(rows, 0, length, g.device)
        was_missing, self._type = self.missing, g.dtype
        self.missing = missing if before is None else tuple(own for own in missing if own in self.missing)
        self.samples += samples
        if self._alone:
            self._sum, self._selection = g, selection
            return 0
        if before is None:
            is_dense, last = selection is None and self._selection is None, self._sum
            if is_dense and last is not None and not self._travels:
                last.copy_(g)
            else:
                self._sum, self._selection = g.to(sum_type(g.dtype), copy=True), selection
            return 2.0 if selection is None else 2.0 * len(g) / length
        if selection is None and self._selection is None:
            before.add_(g)
            return 3
        parts = []
        for values, one, without in ((before, self._selection, was_missing), (g, selection, missing)):
            own = one if one is not None else Selection(whole_but(without), 0, length, g.device)
            parts.append((values if one is not None else own.take(values), own, 1.0))
        self._sum, self._selection = sum_selected(parts, before.dtype)
        return 3 * len(self._sum) / length

    def take(self) -> tuple[Tensor, int, Rows | None]:
        """Returns the sum (P,), valid until the next `add`, its samples and its rows; resets the first two."""
        assert self._sum is not None
        samples, self.samples = self.samples, 0
        return self._sum.to(self._type), samples, self._selection.rows if self._selection is not None else None
