"""A part of a placed model that several groups of workers train as Downpour's replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.model_parallel.graph.exchange import Exchange
from paceline.model_parallel.graph.execute import PlacedPart
from paceline.optim.flat import FlatBinding
from paceline.optim.sharding import AxisShape, Shard, Sharding
from paceline.ports.ports import Mailbox, Ports
from paceline.ports.rooted import RootedCollectives


class ReplicaPart:
    """Implements `LayoutPart` for one worker of a replica: as many consecutive workers as the plan has devices.

    Each parameter belongs to one part, whose servers hold it: the plan keeps operations that share it on one device.
    """

    keeps_random_alike = is_placed = True
    pending = without_batch = None
    mates: Mailbox | None = None

    def __init__(self, part: PlacedPart, worker_id: int, num_workers: int, seed: int) -> None:
        self._part, self._seed = part, seed
        num_parts = part.plan.workers
        self.dealt = worker_id // num_parts, num_workers // num_parts
        self.is_recorded = not part.worker
        self.axes: Mapping[str, AxisShape] = {}
        self.whole: Tensor | None = None
        self.repeats: Callable[[], bool] = bool
        self.exchange: Exchange | None = None  # with the other parts of the replica, once connected
        self.binding = FlatBinding(part.parameters(), on_any_device=True)
        self._whole_binding = FlatBinding(part.whole.parameters(), on_any_device=True)
        self.sharding = _sharding(part, self._whole_binding) if num_parts > 1 else None

    def begin(self, ports: Ports[Any], axes: Mapping[str, RootedCollectives], algorithm: Algorithm) -> Ports[Any]:
        return replace(ports, random=Random(f"{self._seed}/{self.dealt[0]}"))

    def agreed(self, number: Callable[[], int]) -> int:
        return number() if self.exchange is None else self.exchange.agreed(number, self._part.plan.workers)

    def take_whole(self, x: Tensor) -> None:
        """Sets the parameters of all parts from the whole model's vector (W,)."""
        for parameter, view in zip(self._whole_binding.parameters, self._whole_binding.views(x), strict=True):
            parameter.data = view.clone()


def _sharding(part: PlacedPart, whole: FlatBinding) -> Sharding:
    """How all parts' vectors are parts of the whole one: the same on all workers."""
    names = {one: name for name, one in part.whole.named_parameters()}
    at = dict(zip(whole.parameters, whole.offsets, strict=True))
    shards, lengths = list[Shard](), list[int]()
    for worker in range(part.plan.workers):
        own = [one for one in whole.parameters if part.owner_of[names[one]] == worker]
        binding = FlatBinding(own or [nn.Parameter(torch.zeros((), dtype=whole.dtype))], on_any_device=True)
        lengths.append(binding.num_elements)
        shards += [
            Shard(at[one], offset, tuple(one.shape), owner=worker)
            for one, offset in zip(own, binding.offsets, strict=False)
        ]
    shards.sort(key=lambda shard: shard.whole_at)
    longest = max(lengths)
    return Sharding(len(lengths), whole.num_elements, longest, longest, tuple(shards), lengths=tuple(lengths))


def check_replicas(algorithm: Algorithm) -> None:
    """Refuses an algorithm whose replicas cannot be groups of workers with a placed model.

    Raises:
        UsageError: the algorithm's servers cannot hold the parts.
    """
    spec = registry.spec(algorithm)
    if not algorithm.serves_parts:
        raise UsageError(
            f"{spec} does not train replicas of a placed model: choose downpour, whose servers hold the parts, or leave the"
            " algorithm out and start as many workers as the plan has devices."
        )
    if algorithm.needs.copies > 1:
        raise UsageError(
            f"The servers of a placed model's parts have no second copies: leave durability=replica out of {spec}."
        )
