"""A parameter server: servers hold the parameters in shards; workers send gradients and get parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from paceline.algorithms.base import Slow, WaitsFor
from paceline.algorithms.server.alone import work_alone
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.client import Client
from paceline.algorithms.server.delay import Delay
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.modes import Async, Mode, Sync
from paceline.algorithms.server.registries import apply_registry
from paceline.algorithms.server.served import Durability, OnDeath, Served, ShardRules
from paceline.algorithms.server.standby import serve_shard
from paceline.algorithms.server.update import COUNTED, DROPPED
from paceline.algorithms.server.user import UserOptimizer
from paceline.compression.codec import Codec, NoCodec
from paceline.compression.registry import check_carrier
from paceline.errors import UsageError, shown
from paceline.optim.settings import not_linear
from paceline.ports.ports import Ports, ServerPorts
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs, ServedParameters
from paceline.specs.bounds import BETWEEN_0_AND_1, SECONDS, SERVERS

_RESCALED = "rate=rescaled"


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Served):
    """A parameter server: synchronous with backup workers, asynchronous, with bounded clocks, or by rules for unequal workers.

    `sync` makes one update of the first N = workers - backups gradients of every step and drops later ones, so that up to
    `backups` slow or dead workers delay no step. `async` applies each gradient as it arrives. `bounded` does so too, but no
    worker begins a step while it is more than `clock_bound` steps ahead of the slowest. `rennala` makes an update of every B
    gradients of the current parameters, from any workers; `ringmaster` drops gradients that are too late; `ringleader` applies
    the mean of the workers' means.

    The run continues without dead workers; late ones start from the current parameters. A dead server is replaced and
    resumes from a snapshot; updates since then are lost, counted and reported. With `durability=replica` every update is
    made exactly once, whichever of a shard's two processes dies; if both die before a new copy is up to date, the run ends
    with an error. A lone worker has no server; without a launcher a loop is plain PyTorch, and `apply` does not run.

    Costs per step: every worker sends a gradient and receives the parameters. All pass the servers' network, the bottleneck
    with many workers: use more shards, on separate machines. The optimizer's state exists once, at the servers.
    `durability=replica` also sends each mean gradient to the copy, which makes the same update in parallel and keeps
    parameters and state a second time.
    Clipping acts on each worker's own gradient before it is sent; in `sync` that is before the mean of N, whereas one step
    with the large batch would clip the mean (`all-reduce` does; a `ClippingWarning` says so).
    Use when: workers come and go, or are unequally fast: `sync` with backups if results must be those of large batches,
    `async` and `bounded` if every gradient should count, `rennala` and `ringmaster` if most workers are many times slower
    than a few, `ringleader` if each has its own data.
    When N doubles: `sync` makes half as many updates of twice the batch: see its `rate`; `async` doubles the staleness: lower
    the learning rate.
    Not: `all-reduce`, which needs no server, and every worker; `locked`, whose workers share the memory of one machine.

    Args:
        mode: `sync(backups=1)`, `async`, `bounded(clock_bound=4)`, `rennala(gradients=8)`, `ringmaster(threshold=8)` or
            `ringleader`; each has its own options. The last three have one shard.
        shards: servers, each with a contiguous part of the vector.
        apply: the rule that applies gradients: the user's own optimizer, or a server rule, which overrides it.
        codec: compresses gradients. A worker's error feedback survives a resumed run but not the worker's death, which the
            result's notes report.
        on_death: after a death, continue without the worker (`shrink`), wait for its replacement (`wait`), or end the run
            (`fail`).
        durability: what survives a dead server: its last `snapshot`, or a `replica`, a second copy of its shard in another
            process, which has every update before its worker is answered, and takes over.
        snapshot_s: for `snapshot`: seconds between a server's snapshots.
        average: decay of a moving average of the parameters and the model's floating-point buffers, such as 0.999, which
            `train` and `simulate` evaluate in place of the newest; None: no average. Costs another vector. Not with
            `durability=replica`.

    Differs from the paper: the first shard decides for all shards which gradients a step of `sync` takes (`quorum=global`);
    steps are numbered, so there are no tokens. The run continues without dead workers.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, Algorithms 1 to 4; `sync` with
        backups is m-synchronous SGD, Begunov and Tyurin 2026, arXiv:2602.03802; for `bounded`
        Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; for `rennala`
        Tyurin and Richtárik 2023, arXiv:2305.12387; for `ringmaster` Maranjyan, Tyurin and Richtárik 2025, arXiv:2501.16168;
        for `ringleader` Maranjyan and Richtárik 2025, arXiv:2509.22860.
    """

    mode: Mode = field(default_factory=Sync)
    shards: Annotated[int, SERVERS] = 1
    apply: ApplyRule = field(default_factory=UserOptimizer)
    codec: Codec = field(default_factory=NoCodec)
    on_death: OnDeath = "shrink"
    durability: Durability = "snapshot"
    snapshot_s: Annotated[float, SECONDS] = 5.0
    average: Annotated[float, BETWEEN_0_AND_1] | None = None

    of_servers: ClassVar[tuple[str, ...]] = ("mode", "shards", "codec", "on_death", "durability", "snapshot_s")

    def __post_init__(self) -> None:
        if isinstance(self.mode, str):
            raise UsageError(
                f"mode must be an object, such as Async() or Sync(backups=1), not {shown(self.mode)}; only specs take "
                "names, such as parse('parameter-server(mode=async)')."
            )
        super().__post_init__()
        check_carrier(self.codec, "push", "parameter-server")
        self.mode.check_shards(self.shards)
        rule = self.apply.rule if isinstance(self.apply, Delayed) else self.apply
        if self.mode.follows_times and not rule.is_linear:
            raise not_linear(_RESCALED, apply_registry.spec(rule), "take apply=sgd or apply=momentum")
        if self.durability == "replica":
            self.mode.check_copies()
        if self.durability == "replica" and self.snapshot_s != 5.0:
            raise UsageError("snapshot_s is for durability=snapshot, not for durability=replica: leave it out.")
        if self.average is not None and self.durability == "replica":
            raise UsageError("Second copies of shards keep no average: leave out average or durability=replica.")

    @property
    def needs(self) -> Needs:
        return super().needs._replace(averaged=self.average is not None)

    @property
    def overrides(self) -> str:
        if not self.apply.overrides_optimizer:
            return ""
        rule = apply_registry.spec(self.apply)
        return (
            f"The servers apply gradients by {rule}, which overrides the workers' optimizer: of that, only the"
            " learning rate counts."
        )

    @property
    def together(self) -> bool:
        return self.mode.together

    @property
    def waits_for(self) -> WaitsFor:
        if not self.mode.waits:
            return "none"
        return "quorum" if self.together else "slowest"

    def waiting_less(self, slow: Slow, num_workers: int) -> ParameterServer | None:
        if not self.mode.waits:
            return None
        return replace(self, mode=self.mode.without_slowest(num_workers) if slow == "worker" else Async())

    def check(self, num_workers: int) -> None:
        super().check(num_workers)
        if num_workers > 1:
            self.mode.check_workers(num_workers)

    def note(self, num_workers: int) -> str:
        return super().note(num_workers) or (self.mode.note if num_workers > 1 else "")

    def delayed(self, delay: Delay) -> ParameterServer:
        if isinstance(self.apply, Delayed):
            raise UsageError("This parameter server already has a delay, apply=delayed(...): leave out one of the two.")
        try:
            return replace(self, apply=Delayed(delay=delay, rule=self.apply))
        except ValueError as error:
            raise UsageError(f"Staleness cannot be injected here: {error}.") from error

    @property
    def notices_deaths(self) -> bool:
        return self.mode.waits

    def unrecorded(self, num_workers: int) -> str:
        if num_workers == 1:
            return ""
        if why := self.mode.unrecorded:
            return why
        return "the order in which gradients waited" if self.lets_gradients_wait else ""

    def weighting(self, num_workers: int) -> str:
        """The option that weights gradients, if the servers apply the workers' own optimizer to them."""
        is_weighted = num_workers > 1 and self.mode.follows_times and not self.apply.overrides_optimizer
        return _RESCALED if is_weighted else ""

    def work(self, replica: Replica, ports: Ports[ServedParameters]) -> None:
        """x: the parameters as this worker last got them (P,); g: its gradient, which the servers apply."""
        if not ports.num_servers:
            work_alone(replica, ports, self.apply, self.average)
            return
        own_step = not self.apply.overrides_optimizer
        client = Client(ports, self.codec, aligned=self.mode.chosen_once, by_workers_optimizer=own_step)
        if self._rules(ports.num_workers).takes_rows and not (self.mode.together and self.apply.echoes):
            replica.take_rows()
            client.follow(replica.lookups if self.apply.takes_lookups else None)
        client.join()
        if self.mode.waits:
            replica.before_meeting = client.meet
        is_counted = False  # whether a gradient waits at the server for its update
        try:
            for _ in replica.steps():
                client.come_back()
                read_version = client.version
                replica.gradient(at=client.x, version=read_version)
                g = replica.g
                client.tell(self.settings_of(replica), replica.optimizer_state)
                answer = client.push(g, replica.samples, replica.rows)
                if answer.applied_version == DROPPED and is_counted:
                    replica.settled(read_version + 1)  # the waiting gradients are in the update that this one missed
                answer.record(replica)
                is_counted = answer.applied_version == COUNTED
        finally:
            if is_counted:  # the next update includes them, at the latest when the last worker leaves
                replica.settled(client.version + 1)
            client.leave()
        if self.mode.ends_with_update:
            client.final()

    def serve(self, shard_id: int, ports: ServerPorts) -> None:
        serve_shard(shard_id, self._rules(ports.num_workers), ports)

    def _rules(self, num_workers: int) -> ShardRules:
        admission, gathering = self.mode.parts(num_workers)
        return ShardRules(
            admission=admission,
            apply=self.apply,
            codec=self.codec,
            on_death=self.on_death,
            scales_rate=self.mode.scales_rate,
            average=self.average,
            chooses=self.mode.chosen_once,
            gathering=gathering,
        )
