"""One parameter vector whose parts are written by servers, in shared memory so that others can read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.memory.atomics import fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.sequence import SequenceLock
from paceline.optim.half_types import sum_type
from paceline.optim.ranges import Ranges, outside
from paceline.ports.shared import shard_ranges
from paceline.system.pages import untouched_zeros

COUNTED = ("dropped", "duplicate", "incomplete", "backups", "malformed", "held")
_CHOSEN = ("last", "fewest", "most")
_COPY = 16


@dataclass(frozen=True, kw_only=True)
class ServedPlan(PartPlan):
    """Where the vector and its words lie."""

    num_servers: int = 0  # the number of shards
    num_copies: int = 1  # of each shard, the server's own included
    averaged: bool = False  # whether there is a second vector, the moving average

    @property
    def num_workers(self) -> int:
        return self.num_writers - self.num_servers * self.num_copies


class ServedVector(SegmentPart[ServedPlan]):
    """The run's vector, as a server, a worker or an observer sees it; implements `ServedParameters`.

    A server's `x` (n,) is its shard. A worker's `x` (P,) is a copy in its own memory, which servers' messages fill. Without
    servers, a lone worker's `x` is the vector itself. A sequence lock guards each shard: a copy is repeated if the shard was
    written meanwhile. Its words outlive the server, so that its successor continues the counts.
    """

    plan_type = ServedPlan
    begin = 0  # its first element in a checkpoint

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        plan, participant_id = self._plan, self._participant
        self.ranges = shard_ranges(plan.num_parameters, max(1, plan.num_servers))
        is_server = plan.num_workers <= participant_id < plan.num_writers and plan.num_servers
        self._shard = (participant_id - plan.num_workers) % plan.num_servers if is_server else 0
        self._whole = self._vector("x")
        if participant_id < plan.num_workers and plan.num_servers:
            self.x = untouched_zeros(plan.num_parameters, plan.dtype)
        elif participant_id < plan.num_writers:
            self.x = self._whole[slice(*self.ranges[self._shard])]
        else:
            self.x = self._whole
        self._average: torch.Tensor | None = None
        self.average: torch.Tensor | None = None  # like `x`, of all updates, for evaluation; float32 of half types
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # the model's, each with its average
        if plan.averaged:
            self._average = self._segment.tensor(plan.at["average"], plan.num_parameters, sum_type(plan.dtype))
            self.average = self._average
            if plan.num_workers <= participant_id < plan.num_writers:
                self.average = self._average[slice(*self.ranges[self._shard])]
        self._version = self._word("words", self._shard)
        self._own_lock = self._lock(self._shard)
        self.is_elsewhere = False  # the servers write to another process's memory; a worker's snapshot is its own copy
        self.waited_s = 0.0

    @staticmethod
    def areas(layout: Layout, plan: ServedPlan) -> dict[str, int]:
        at = {"x": layout.vector("served.x", plan.num_parameters, plan.dtype)}
        # For each shard, on its own line: version, sequence, the copy's incarnation + 1; on another, a word per COUNTED.
        at["words"] = layout.words("served.words", max(1, plan.num_servers))
        at["counts"] = layout.words("served.counts", max(1, plan.num_servers))
        # On one line, one word for each of _CHOSEN; 0: nothing is chosen.
        at["chosen"] = layout.words("served.chosen", 1)
        if plan.averaged:
            at["average"] = layout.vector("served.average", plan.num_parameters, sum_type(plan.dtype))
        return at

    @property
    def version(self) -> int:
        """Updates applied to this server's shard; for other members, to the first shard."""
        return load(self._version)

    def initialise(self, x: torch.Tensor | None, version: int = 0) -> None:
        """Sets the initial vector (P,) and version; None: the servers have theirs in another process."""
        if x is not None:
            self._whole.copy_(x)
        if x is not None and self._average is not None:
            self._average.copy_(x)
        for shard in range(len(self.ranges)):
            store(self._word("words", shard), version)

    def keep_copy(self, x: torch.Tensor) -> None:
        """Makes `x` (P,), on any device, this worker's copy; the servers write to memory of another process."""
        self.x = x
        self.is_elsewhere = True

    def _lock(self, shard: int) -> SequenceLock:
        return SequenceLock(self._word("words", shard) + 8, "served.mid_write")

    def writing(self, part: float = 1.0) -> AbstractContextManager[None]:
        return self._own_lock.writing()

    def advance(self) -> int:
        return fetch_add(self._version, 1) + 1

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        with self.writing():
            if version is not None:
                store(self._version, version)
            self.x.copy_(x)

    def name_copy(self, incarnation: int | None, shard: int | None = None) -> None:
        word = self._word("words", self._shard if shard is None else shard)
        store(word + _COPY, 0 if incarnation is None else incarnation + 1)

    def named_copy(self, shard: int) -> int | None:
        number = load(self._word("words", shard) + _COPY)
        return number - 1 if number else None

    def count(self, what: str, number: int = 1) -> None:
        fetch_add(self._word("counts", self._shard) + 8 * COUNTED.index(what), number)

    def choose(self, number: int) -> None:
        """Records the only server's choice, 1 or more, for its successors."""
        chosen = self.chosen() or {}
        values = (number, min(number, chosen.get("fewest", number)), max(number, chosen.get("most", number)))
        for place in reversed(range(len(_CHOSEN))):  # the first word marks the others as written
            store(self._word("chosen") + 8 * place, values[place])

    def chosen(self) -> dict[str, int] | None:
        """The last choice and the range of choices; None: nothing has been chosen."""
        values = [load(self._word("chosen") + 8 * place) for place in range(len(_CHOSEN))]
        return dict(zip(_CHOSEN, values, strict=True)) if values[0] else None

    def counts(self) -> list[dict[str, int]]:
        words = ((self._word("words", shard), self._word("counts", shard)) for shard in range(len(self.ranges)))
        return [
            {"version": load(version), **{what: load(first + 8 * n) for n, what in enumerate(COUNTED)}}
            for version, first in words
        ]

    def snapshot(self, out: torch.Tensor, left_out: Ranges = ()) -> int:
        """Copies the run's vector into `out` (P,), each shard consistent with one version; returns the first shard's version.

        Elements that are `left_out` stay as they are. If a server died in the middle of a write, waits until a successor takes
        over, or until it is given up (`recover`).
        """
        if self.is_elsewhere:
            for part in outside(left_out, 0, len(out)):
                out[part].copy_(self.x[part])
            return self.version
        versions = [self._copy(shard, self._whole, out, left_out) for shard in range(len(self.ranges))]
        return versions[0]

    def replace(self, x: torch.Tensor) -> None:
        if self.is_elsewhere:
            self.x.copy_(x)
            return
        for shard, (begin, end) in enumerate(self.ranges):
            with self._lock(shard).writing():
                for vector in (self._whole, self._average):
                    if vector is not None:
                        vector[begin:end].copy_(x[begin:end])

    def snapshot_average(self, out: torch.Tensor) -> int:
        assert self._average is not None
        versions = [self._copy(shard, self._average, out) for shard in range(len(self.ranges))]
        return versions[0]

    def _copy(self, shard: int, vector: torch.Tensor, out: torch.Tensor, left_out: Ranges = ()) -> int:
        def copy() -> int:
            version = load(self._word("words", shard))
            for part in outside(left_out, *self.ranges[shard]):
                out[part].copy_(vector[part])
            return version

        return self._lock(shard).copied(copy, f"server {shard}")

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Ends the unfinished write of a dead server that has no successor; returns whether there was one."""
        shard = participant_id - self._plan.num_workers
        return 0 <= shard < self._plan.num_servers and self._lock(shard).recover()


class PrivateShard:
    """A shard's second copy, in its process's own memory; implements the server's part of `ServedParameters`."""

    def __init__(self, num_elements: int, dtype: torch.dtype, ranges: tuple[tuple[int, int], ...]) -> None:
        self.x = torch.zeros(num_elements, dtype=dtype)
        self.ranges = ranges
        self.version = 0

    @contextmanager
    def writing(self, part: float = 1.0) -> Iterator[None]:
        fail_point("copy.mid_write")
        yield

    def advance(self) -> int:
        self.version += 1
        return self.version

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        self.x.copy_(x)
        self.version = self.version if version is None else version

    def count(self, what: str, number: int = 1) -> None:
        """The server counts."""

    def choose(self, number: int) -> None:
        """The server notes it."""

    def name_copy(self, incarnation: int | None) -> None:
        """There is no third."""
