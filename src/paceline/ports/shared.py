"""The kinds of shared parameters, and how an algorithm requests one.

Shapes: `x` and every vector here is flat, `(P,)`, one element per parameter of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch

_ALIGNMENT = 16  # elements: shards begin at whole cache lines of float32


class View(NamedTuple):
    """One published parameter vector, as a reader holds it."""

    slot: int  # in the pool
    version: int  # number of updates that led to it
    x: torch.Tensor  # (P,); must not be written while it is published


class SharedParameters(Protocol):
    """One parameter vector that all workers see. `memory/` has a class per discipline."""

    @property
    def version(self) -> int:
        """Number of updates applied so far."""
        ...


class WritableParameters(SharedParameters, Protocol):
    """A vector that is written in place: the base of the kinds below."""

    x: torch.Tensor  # (P,)

    def writing(self) -> AbstractContextManager[Any]:
        """Marks the vector as being written, so that other processes do not copy a torn vector."""
        ...

    def advance(self) -> int:
        """Counts one update; returns the version that it made."""
        ...


class RacingParameters(WritableParameters, Protocol):
    """All workers read and write `x` at the same time, component by component (Hogwild!).

    `writing` excludes no other writer, and a kill in it can tear the update. `advance` is atomic.
    """


class LockedParameters(WritableParameters, Protocol):
    """One writer at a time; readers exclude writers. Waiting time is added to this worker's account.

    `x` is read under `reading()` and written under `writing()`, which holds the lock; `advance` is called under it, too.
    """

    backoff: Callable[[int], float] | None  # seconds to sleep after the n-th failure, from 0; None: workers queue

    def reading(self) -> AbstractContextManager[Any]:
        """Holds the lock for reading (the mutex itself, or the shared side of a read-write lock)."""
        ...


class SlotParameters(SharedParameters, Protocol):
    """A pool of immutable versions behind one head word (Leashed-SGD's ParameterVectors, recycled)."""

    def latest(self) -> View:
        """The newest version, protected from reuse until this worker calls `leave` or `latest` again."""
        ...

    def leave(self) -> None:
        """Ends the protection of what `latest` returned."""

    def claim(self) -> View:
        """An unpublished slot without readers, for this worker to write."""
        ...

    def publish(self, new: View, after: View) -> bool:
        """Makes `new` the newest version if `after` (from `latest`) still is; one compare-and-swap.

        On success the slot of `new` belongs to the pool again; on failure it still belongs to this worker.
        """
        ...

    def discard(self, new: View) -> None:
        """Gives a claimed slot back unpublished."""


class ReplicatedParameters(WritableParameters, Protocol):
    """One vector per worker, which the algorithm keeps equal or close; others may read it, only its owner writes."""

    def advance(self, updates: int = 1) -> int:
        """Counts one update of this worker's vector, or, with 0, a change that is not an update; returns the new version."""
        ...

    def go_on_with(self, members: Sequence[int]) -> None:
        """Notes that only these workers take part in updates after the present version: the others have died."""


class ServedParameters(WritableParameters, Protocol):
    """One vector, cut into contiguous shards, each written by the one server that holds it.

    `x` is a server's own shard (n,), a worker's private copy of the whole vector, or a lone worker's vector itself.
    """

    ranges: tuple[tuple[int, int], ...]  # each shard's first element, and the one after its last

    def writing(self, part: float = 1.0) -> AbstractContextManager[Any]:
        """As in `WritableParameters`; `part` is the share of the elements that are written."""
        ...

    def count(self, what: str, number: int = 1) -> None:
        """Counts `dropped`, `duplicate` or `held` gradients, `incomplete` rounds, `backups`, `malformed` messages."""

    def choose(self, number: int) -> None:
        """Records for the result the number of gradients, or the threshold, that `auto` has chosen last."""

    def restore(self, x: torch.Tensor, version: int | None = None) -> None:
        """Sets this server's shard to `x` (n,), even if it was torn, and to this version; None: keeps the version."""

    def name_copy(self, incarnation: int | None) -> None:
        """Records which process of the shard's second copy has every answered update; None: no process does."""


class AveragedParameters(WritableParameters, Protocol):
    """Served parameters with a moving average, which is evaluated instead."""

    average: torch.Tensor  # like `x`; written while `writing`
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]  # the model's floating-point buffers, each with its average


class StalenessCounts(Protocol):
    """How often each staleness occurred, over all workers; racing counters."""

    def add(self, staleness: int) -> None:
        """Counts one update of this staleness (the last bin takes all above it)."""

    def share_below(self, staleness: int) -> float:
        """Share of the updates so far whose staleness was smaller, 0 to 1."""
        ...

    def total(self) -> int:
        """Number of updates counted so far."""
        ...


AVERAGE = "average "  # before a buffer's name: its moving average
BUCKET_BYTES = 1 << 20  # large enough that latency (about 0.2 ms over Gloo) does not dominate an operation


class Needs(NamedTuple):
    """An algorithm's requirements: the kind of shared parameters, which is `ports.shared`, and the other ports it uses."""

    kind: Literal["racing", "locked", "slots", "replicated", "served"]
    lock: Literal["mutex", "rwlock"] = "mutex"  # for "locked"
    collectives: bool = False  # whether the program uses `ports.collectives`
    one_machine: bool = False  # simulated collectives go through the memory of one machine, not over a network
    staleness_counts: bool = False  # whether it reads `ports.staleness`
    mailbox: bool = False  # whether the program uses `ports.mailbox` and `ports.concurrency`
    views: bool = False  # whether it goes through rounds of messages, and uses `ports.views` where there are any
    averaged: bool = False  # the vector and the model's buffers have a moving average, for evaluation ("served")
    own_models: bool = False  # every worker has its own model; a snapshot is their mean
    servers: int = (
        0  # programs besides the workers that hold the run's vector in shards ("served"); a lone worker has none
    )
    copies: int = 1  # programs that hold each shard: with 2, one serves and the other follows
    bucket_bytes: int = BUCKET_BYTES  # least size of what `Replica.gradient` hands out during backward
    # Whether timing decides what the records of steps do not have, and the program tells `ports.decided`.
    order: bool = False

    @property
    def server_programs(self) -> int:
        """Programs besides the workers, in a run of several workers."""
        return self.servers * self.copies

    def num_vectors(self, num_workers: int) -> int:
        """Minimum number of parameter-length vectors at `num_workers` workers: parameters and gradients, and the newest."""
        return num_workers * (1 if self.kind == "racing" else 2) + 1


def shard_ranges(num_elements: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    """Contiguous ranges of nearly equal length that cover a vector.

    >>> shard_ranges(100, 3)
    ((0, 32), (32, 64), (64, 100))
    """
    lines = num_elements // _ALIGNMENT
    cuts = [_ALIGNMENT * (lines * shard // num_shards) for shard in range(num_shards)]
    return tuple(zip(cuts, [*cuts[1:], num_elements], strict=True))
