"""What a shard is put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.algorithms.server.admission import Admission
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.gathering import Gathering, NoGathering
from paceline.compression.codec import Codec

__all__ = ["OnDeath", "ShardRules"]

OnDeath = Literal["shrink", "wait", "fail"]


@dataclass(frozen=True, kw_only=True)
class ShardRules:
    """What the shards of a server are put together from.

    Args:
        admission: makes a shard's admission.
        apply: by which rule gradients become updates.
        codec: what gradients look like on their way.
        on_death: what follows from a worker's death.
        scales_rate: whether the learning rate grows with the number of gradients in an update.
        chooses: whether shard 0 chooses for all whose gradients make a step.
        gathering: where admitted gradients are gathered, of which an update has several of one worker.
        average: decay of the moving average that is evaluated; None: there is none.
    """

    admission: Callable[[int], Admission]
    apply: ApplyRule
    codec: Codec
    on_death: OnDeath = "shrink"
    scales_rate: bool = False
    chooses: bool = False
    gathering: Gathering = field(default_factory=NoGathering)
    average: float | None = None
