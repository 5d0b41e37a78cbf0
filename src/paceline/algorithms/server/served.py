"""The base class of algorithms with parameter servers, and the components of their shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from paceline.algorithms.base import Algorithm
from paceline.algorithms.server.admission import Admission
from paceline.algorithms.server.apply import ApplyRule, one_rate
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.gathering import Gathering
from paceline.compression.codec import Codec, NoCodec
from paceline.errors import UsageError, name_workers
from paceline.optim.settings import OptimizerSettings, check_served
from paceline.ports.replica import Replica
from paceline.ports.shared import Needs

OnDeath = Literal["shrink", "wait", "fail"]
Durability = Literal["snapshot", "replica"]


@dataclass(frozen=True, kw_only=True)
class ShardRules:
    """The components of a server's shards."""

    admission: Callable[[int], Admission]  # makes a shard's admission
    apply: ApplyRule  # the rule that applies gradients
    codec: Codec  # compresses gradients
    on_death: OnDeath = "shrink"  # the reaction to a worker's death
    scales_rate: bool = False  # whether the learning rate grows with the number of gradients in an update
    chooses: bool = False  # whether shard 0 chooses whose gradients make a step, for all shards
    #: Gathers admitted gradients if an update can include several of one worker.
    gathering: Gathering = field(default_factory=Gathering)
    average: float | None = None  # decay of the moving average used for evaluation; None: no average

    @property
    def takes_rows(self) -> bool:
        return self.gathering.takes_rows and self.apply.takes_rows and isinstance(self.codec, NoCodec)


class Served(Algorithm):
    """An algorithm whose servers hold the parameters: it has a workers' program, `work`, and a servers' program, `serve`.

    Subclasses are dataclasses with a field `shards`, the number of servers in a run of several workers, and usually with
    `apply`, the servers' rule, and `codec`, which compresses the gradients sent to them.
    """

    tolerates: ClassVar[tuple[str, ...]] = ("kill", "straggler")
    #: Options that need servers, and so have no effect with one worker.
    of_servers: ClassVar[tuple[str, ...]] = ()

    shards: int
    apply: ApplyRule
    codec: Codec = NoCodec()
    durability: Durability = "snapshot"

    @property
    def server_rule(self) -> ApplyRule:
        return self.apply

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], num_workers: int) -> None:
        super().check_optimizers(optimizers, num_workers)
        groups = [group for one in optimizers for group in one.param_groups]
        if self.server_rule.overrides_optimizer and any(group.get("maximize") for group in groups):
            raise UsageError(
                "The servers' rule overrides the optimizer and minimizes the loss, but the optimizer has maximize=True: negate"
                " the loss, and leave out maximize."
            )
        if num_workers > 1:
            for one in optimizers:
                check_served(one)

    def settings_of(self, replica: Replica) -> OptimizerSettings:
        """What the servers are told of a worker's optimizer.

        Raises:
            UsageError: its groups have different learning rates, and the servers' rule has one.
        """
        settings = replica.optimizer_settings()
        if self.server_rule.overrides_optimizer:
            one_rate(settings)
        return settings

    def lost_with(self, workers: Sequence[int]) -> str:
        if not workers or not self.codec.remembers:
            return ""
        return f"What the codec of {name_workers(sorted(set(workers)))} had kept back of gradients is lost."

    @property
    def needs(self) -> Needs:
        copies = 2 if self.durability == "replica" else 1
        return Needs("served", mailbox=True, servers=self.shards, copies=copies, order=self.keeps_order)

    @property
    def keeps_order(self) -> bool:
        """Whether each shard's order of updates is recorded; that of one shard is in the records of steps."""
        return self.shards > 1

    @property
    def default_learning_rate(self) -> float | None:
        return self.server_rule.default_learning_rate

    @property
    def lets_gradients_wait(self) -> bool:
        return isinstance(self.server_rule, Delayed)

    def note(self, num_workers: int) -> str:
        """Names the chosen options that have no effect with a lone worker."""
        chosen = [name for name in self.of_servers if getattr(self, name) != getattr(type(self)(), name)]
        if num_workers > 1 or not chosen:
            return ""
        return f"A lone worker needs no server and has none: {', '.join(chosen)} {'play' if chosen[1:] else 'plays'} no part."
