"""A simulated parameter server's memory: shards at the servers, copies at the workers, optionally a moving average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges
from paceline.ports.private import EXCLUDES_NOBODY
from paceline.ports.shared import shard_ranges
from paceline.simulator.hardware.core import Core


@dataclass(eq=False)
class SimulatedShard:
    """A server's shard, or a lone worker's vector, whose replica charges the time; implements `ServedParameters`."""

    x: torch.Tensor
    ranges: tuple[tuple[int, int], ...]
    update_vectors: float  # vectors of the shard's size that one update moves
    average: torch.Tensor | None = None
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    version: int = 0
    chosen: dict[str, int] | None = None
    core: Core | None = None  # takes an update's time; None: no charge here
    on_update: Callable[[int], None] | None = None  # called with the version of each update

    def __post_init__(self) -> None:
        self.counts = {"dropped": 0, "duplicate": 0, "incomplete": 0, "backups": 0, "malformed": 0, "held": 0}

    def writing(self, part: float = 1.0) -> AbstractContextManager[None]:
        if self.core is not None:
            self.core.move(part * self.update_vectors / len(self.ranges))
        return EXCLUDES_NOBODY

    def advance(self) -> int:
        self.version += 1
        if self.on_update is not None:
            self.on_update(self.version)
        return self.version

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def choose(self, number: int) -> None:
        before = self.chosen or {}
        fewest, most = min(number, before.get("fewest", number)), max(number, before.get("most", number))
        self.chosen = {"last": number, "fewest": fewest, "most": most}

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        self.x.copy_(x)
        self.version = self.version if version is None else version

    def name_copy(self, incarnation: int | None) -> None:
        """Does nothing: no server dies here."""


@dataclass(eq=False)
class SimulatedCopy:
    """A worker's copy of the servers' parameters; implements `ServedParameters`."""

    x: torch.Tensor
    ranges: tuple[tuple[int, int], ...]
    version: int = 0


class ServedState:
    """One sharded vector, as an observer sees it."""

    def __init__(
        self,
        x: torch.Tensor,
        num_workers: int,  # of the run; the cores of servers, and then of their second copies, are numbered after the workers'
        num_servers: int,  # the number of shards; 0: a lone worker holds the vector
        *,
        averaged: bool,
        update_vectors: float,
    ) -> None:
        self.x = x
        self._num_workers, self._num_servers = num_workers, num_servers
        self.average = x.to(sum_type(x.dtype), copy=True) if averaged else None
        self.average_buffers: dict[str, torch.Tensor] = {}
        self.ranges = shard_ranges(x.numel(), max(1, num_servers))
        parts = [None if self.average is None else self.average[begin:end] for begin, end in self.ranges]
        self._update_vectors = update_vectors
        self.shards = [
            SimulatedShard(x[begin:end], self.ranges, update_vectors, part)
            for (begin, end), part in zip(self.ranges, parts, strict=True)
        ]

    def initialise(self, x: torch.Tensor, version: int) -> None:
        self.replace(x)
        for shard in self.shards:
            shard.version = version

    def of(self, core: Core) -> SimulatedShard | SimulatedCopy:
        server = core.worker_id - self._num_workers  # below 0: a worker
        if not self._num_servers:
            return self.shards[0]
        if server < 0:
            return SimulatedCopy(self.x.clone(), self.ranges)
        shard = self.shards[server % self._num_servers]
        if server >= self._num_servers:  # its second copy
            shard = SimulatedShard(torch.zeros_like(shard.x), self.ranges, self._update_vectors)
        shard.core = core
        return shard

    def average_also(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            self.average_buffers[name] = buffer.to(sum_type(buffer.dtype), copy=True)
            self.shards[0].buffers.append((buffer, self.average_buffers[name]))

    def snapshot_average(self, out: torch.Tensor) -> int:
        assert self.average is not None
        out.copy_(self.average)
        return self.version

    @property
    def version(self) -> int:
        return self.shards[0].version

    def snapshot(self, out: torch.Tensor, left_out: Ranges = ()) -> int:
        out.copy_(self.x)
        return self.version

    def replace(self, x: torch.Tensor) -> None:
        self.x.copy_(x)
        if self.average is not None:
            self.average.copy_(x)

    def counts(self) -> list[dict[str, int]]:
        return [{"version": shard.version, **shard.counts} for shard in self.shards]

    def chosen(self) -> dict[str, int] | None:
        return self.shards[0].chosen
