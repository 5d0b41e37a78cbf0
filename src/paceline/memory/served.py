"""One parameter vector whose parts are written by servers, in shared memory so that others can look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from paceline.memory.atomics import fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import LINE_BYTES, Layout, Segment
from paceline.memory.sequence import SequenceLock
from paceline.ports.shared import shard_ranges
from paceline.vectors.half_types import sum_type

__all__ = ["COUNTED", "SecondCopy", "ServedVector"]

COUNTED = ("dropped", "duplicate", "incomplete", "backups", "malformed")
_COPY = 16 + 8 * len(COUNTED)


@dataclass(frozen=True)
class ServedPlan:
    """Where the vector and its words lie; the same in every process."""

    vector: int
    words: int  # of each shard, on a line of its own: version, sequence, one for each of COUNTED, the copy's incarnation + 1
    num_parameters: int
    num_workers: int
    num_servers: int
    num_copies: int  # of each server's shard, its own included
    dtype: torch.dtype
    average: int | None = None  # a second vector


class ServedVector:
    """The run's vector, as a server, a worker or an onlooker sees it; implements `ServedParameters`.

    A server's `x` (n,) is its shard. A worker's `x` (P,) is a copy in its own memory, which servers' messages fill. Without
    servers, a lone worker's `x` is the vector itself. A shard has a sequence lock: whoever copies it tries again if it was
    written meanwhile. Its words outlive the server, so that its successor counts on.

    Args:
        segment: shared memory made from the layout of `plan`.
        plan: from `reserve`.
        participant_id: a worker's id; a server's, from the number of workers on; an evaluator's is beyond all.
        incarnation: unused here, as nothing is held that others wait for.
        abort_address: unused here, as nothing waits.

    Attributes:
        average: like `x`, or None: of all updates, for evaluation; float32 of half types.
        buffers: the model's, each with its average.
        is_elsewhere: the servers write to memory of another process; a worker's snapshot is then its own copy.
    """

    def __init__(
        self, segment: Segment, plan: ServedPlan, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        self._segment = segment
        self._plan = plan
        self.ranges = shard_ranges(plan.num_parameters, max(1, plan.num_servers))
        is_server = plan.num_workers <= participant_id < self._num_members and plan.num_servers
        self._shard = (participant_id - plan.num_workers) % plan.num_servers if is_server else 0
        self._vector = segment.tensor(plan.vector, (plan.num_parameters,), plan.dtype)
        if participant_id < plan.num_workers and plan.num_servers:
            self.x = torch.zeros_like(self._vector)
        elif participant_id < self._num_members:
            self.x = self._vector[slice(*self.ranges[self._shard])]
        else:
            self.x = self._vector
        self._average: torch.Tensor | None = None
        self.average: torch.Tensor | None = None
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        if plan.average is not None:
            self._average = self.average = segment.tensor(plan.average, (plan.num_parameters,), sum_type(plan.dtype))
            if plan.num_workers <= participant_id < self._num_members:
                self.average = self._average[slice(*self.ranges[self._shard])]
        self._version = self._word(self._shard)
        self._own_lock = self._lock(self._shard)
        self.is_elsewhere = False
        self.waited_s = 0.0

    @property
    def _num_members(self) -> int:
        return self._plan.num_workers + self._plan.num_servers * self._plan.num_copies

    @staticmethod
    def reserve(
        layout: Layout,
        num_parameters: int,
        num_participants: int,
        *,
        num_evaluators: int = 0,
        num_servers: int = 0,
        num_copies: int = 1,
        averaged: bool = False,
        dtype: torch.dtype = torch.float32,
        name: str = "served",
    ) -> ServedPlan:
        """Reserves one vector for all; `num_participants` counts servers, their copies and evaluators in."""
        vector = layout.vector(f"{name}.x", num_parameters, dtype)
        words = layout.words(f"{name}.words", max(1, num_servers))
        num_workers = num_participants - num_evaluators - num_servers * num_copies
        average = layout.vector(f"{name}.average", num_parameters, sum_type(dtype)) if averaged else None
        return ServedPlan(vector, words, num_parameters, num_workers, num_servers, num_copies, dtype, average)

    def _word(self, shard: int) -> int:
        return self._segment.address + self._plan.words + LINE_BYTES * shard

    @property
    def version(self) -> int:
        """Updates applied to this server's shard; for all others, to the first one."""
        return load(self._version)

    def initialise(self, x: torch.Tensor, version: int = 0) -> None:
        """Gives the vector the values of `x` (P,)."""
        self._vector.copy_(x)
        if self._average is not None:
            self._average.copy_(x)
        for shard in range(len(self.ranges)):
            store(self._word(shard), version)

    def _lock(self, shard: int) -> SequenceLock:
        return SequenceLock(self._word(shard) + 8, "served.mid_write")

    def writing(self) -> AbstractContextManager[None]:
        """Marks the shard as being written."""
        return self._own_lock.writing()

    def advance(self) -> int:
        """Counts one update."""
        return fetch_add(self._version, 1) + 1

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        """Gives this server's shard the values of `x` (n,), however it was left, and this version; None: it goes on."""
        with self.writing():
            if version is not None:
                store(self._version, version)
            self.x.copy_(x)

    def name_copy(self, incarnation: int | None, shard: int | None = None) -> None:
        """Notes which process of the shard's second copy has all that was ever answered; None: there is none."""
        store(
            self._word(self._shard if shard is None else shard) + _COPY, 0 if incarnation is None else incarnation + 1
        )

    def named_copy(self, shard: int) -> int | None:
        """What was noted there."""
        number = load(self._word(shard) + _COPY)
        return number - 1 if number else None

    def count(self, what: str, number: int = 1) -> None:
        """Counts something for the run's result."""
        fetch_add(self._version + 16 + 8 * COUNTED.index(what), number)

    def counts(self) -> list[dict[str, int]]:
        """What each shard has counted, and its version."""
        return [
            {"version": load(word), **{what: load(word + 16 + 8 * n) for n, what in enumerate(COUNTED)}}
            for word in map(self._word, range(len(self.ranges)))
        ]

    def snapshot(self, out: torch.Tensor) -> int:
        """Copies the run's vector into `out` (P,), each shard as nobody was writing it; returns the first one's version.

        A shard whose server died in the middle of a write is waited for, as its successor takes over.
        """
        if self.is_elsewhere:
            out.copy_(self.x)
            return self.version
        versions = [self._copy(shard, self._vector, out) for shard in range(len(self.ranges))]
        return versions[0]

    def replace(self, x: torch.Tensor) -> None:
        """Gives the run's vector, and its average, the values of `x` (P,), once no worker sends gradients."""
        if self.is_elsewhere:
            self.x.copy_(x)
            return
        for shard, (begin, end) in enumerate(self.ranges):
            with self._lock(shard).writing():
                for vector in (self._vector, self._average):
                    if vector is not None:
                        vector[begin:end].copy_(x[begin:end])

    def snapshot_average(self, out: torch.Tensor) -> int:
        """The same of the moving average."""
        assert self._average is not None
        versions = [self._copy(shard, self._average, out) for shard in range(len(self.ranges))]
        return versions[0]

    def _copy(self, shard: int, vector: torch.Tensor, out: torch.Tensor) -> int:
        part = slice(*self.ranges[shard])

        def copy() -> int:
            version = load(self._word(shard))
            out[part].copy_(vector[part])
            return version

        return self._lock(shard).copied(copy, f"server {shard}")

    def recover(self, participant_id: int, incarnation: int) -> bool:
        """Nothing that a worker holds is anybody else's: no update is torn by its death."""
        return False


class SecondCopy:
    """A shard's second copy, in its process's own memory; implements the server's part of `ServedParameters`.

    Args:
        num_elements: of the shard.
        dtype: of the vector.
        ranges: of all shards.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, ranges: tuple[tuple[int, int], ...]) -> None:
        self.x = torch.zeros(num_elements, dtype=dtype)
        self.ranges = ranges
        self.version = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody looks."""
        fail_point("copy.mid_write")
        yield

    def advance(self) -> int:
        """Counts one update."""
        self.version += 1
        return self.version

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        """Takes over parameters (n,) and their version."""
        self.x.copy_(x)
        self.version = self.version if version is None else version

    def count(self, what: str, number: int = 1) -> None:
        """The server counts."""

    def name_copy(self, incarnation: int | None) -> None:
        """There is no third."""
