"""The components of a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.algorithms.server.admission import Admission
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.gathering import Gathering
from paceline.compression.codec import Codec

__all__ = ["OnDeath", "ShardRules"]

OnDeath = Literal["shrink", "wait", "fail"]


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
