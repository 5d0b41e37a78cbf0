"""The shared memory of one run: parameters, records, counters and control words, laid out once and mapped by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from paceline.memory import atomics
from paceline.memory.axes import Axes, AxesPlan, plan_axes
from paceline.memory.collectives import SharedMemoryCollectives
from paceline.memory.epoch_claims import SharedEpochClaims
from paceline.memory.locked import LockedVector
from paceline.memory.newcomers import SharedNewcomers
from paceline.memory.racing import RacingVector
from paceline.memory.replicated import ReplicatedVector
from paceline.memory.ring import RecordRing
from paceline.memory.rounds import Rounds
from paceline.memory.seats import Seats
from paceline.memory.segment import LINE_BYTES, Layout, NamedLayout, Segment
from paceline.memory.served import ServedVector
from paceline.memory.served_parts import ServedParts
from paceline.memory.sharded import ShardedVectors
from paceline.memory.shared_store import SharedStore
from paceline.memory.slots import SlotPool
from paceline.memory.staleness import SharedStalenessCounts
from paceline.memory.views import SharedViews
from paceline.memory.waiting import wake
from paceline.optim.sharding import REPLICAS, AxisShape, Sharding
from paceline.ports.ports import Ports, ServerPorts
from paceline.ports.shared import AVERAGE, Needs
from paceline.records.order import ORDER, OrderWriter
from paceline.system.clock import RealClock

# A worker at full speed on a tiny model makes about 5,000 steps a second; the supervisor empties the rings every 50 ms.
_RING_RECORDS = 16_384

_CONTROL_WORDS = (
    "abort",
    "go",
    "next_batch",
    "checkpoint_epoch",
    "checkpoint_step",
    "epoch",
    "initial_version",
    "workers_done",
    "unresolved_exchanges",
    "delay",
    "unrecorded",
    "final",
)
_CONTROL_STRIDE_BYTES = 64


@dataclass(frozen=True)
class ArenaPlan:
    """The layout of the memory; pickled to every worker."""

    size_bytes: int
    num_workers: int
    num_servers: int
    num_elements: int
    dtype: torch.dtype
    needs: Needs
    control: int
    shared: Any
    collectives: Any
    views: Any  # where workers that exchange messages in rounds see who takes part
    newcomers: Any  # where the others can let a dead worker's replacement in
    staleness: Any
    rings: tuple[Any, ...]
    orders: tuple[Any, ...]  # rings of what timing decides; (): nothing is recorded of that
    epoch_claims: int
    stores: tuple[int, ...]  # one for each part of a model whose parts have servers of their own
    mates: tuple[int, ...]  # likewise, one for each replica whose parts exchange messages
    rounds: tuple[int, ...]  # one word for each group of workers that goes through rounds together
    ended: int  # one word per worker: nonzero once its program has ended
    extra: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]  # named tensors: buffers, shared optimizer state
    seats: Seats
    sharding: Sharding | None = None  # workers' vectors have shards; `num_elements` are the whole model's
    axes: AxesPlan | None = None  # of the workers that share a model, and of its replicas
    memory_order: str = ""  # of the model's parameters: `FlatBinding.memory_order`

    @property
    def num_server_programs(self) -> int:
        """The servers, and their second copies; in the mailbox they come after the workers."""
        return self.num_servers * self.needs.copies


def plan_arena(
    needs: Needs,
    *,
    num_workers: int,
    num_elements: int,
    dtype: torch.dtype,
    extra: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    sharding: Sharding | None = None,
    memory_order: str = "",
) -> ArenaPlan:
    """Lays out the memory for `num_workers` workers, their servers, and one evaluator.

    `num_elements` is the length P of the flat vector, padding included. `extra` names further tensors that all workers share,
    with shape and type. `sharding` is given if the workers of a group hold a model between them.
    """
    layout = Layout()
    control = layout.reserve("control", _CONTROL_STRIDE_BYTES * len(_CONTROL_WORDS), alignment_bytes=64)
    num_parts = sharding.parts if sharding is not None and needs.kind == "served" else 1
    num_servers = num_parts * needs.servers if num_workers > 1 else 0  # a lone worker needs none
    seats = Seats(num_parts, num_workers, num_servers * needs.copies)
    num_participants = num_workers + num_servers * needs.copies + 1
    kind = _kind(needs, sharding)
    options: dict[str, Any] = {}
    own_elements = num_elements
    if sharding is not None:
        options, own_elements = {"sharding": sharding}, sharding.num_local
    if needs.kind == "served":
        options |= {"num_servers": num_servers // num_parts, "num_copies": needs.copies, "averaged": needs.averaged}
    if num_parts > 1:
        options["seats"] = seats
    shared = kind.reserve(layout, own_elements, num_participants, num_evaluators=1, dtype=dtype, **options)
    axes = None
    if sharding is not None:
        replicas = AxisShape(num_workers // sharding.parts if num_parts == 1 else 1, sharding.parts)
        axes = plan_axes(layout, num_workers, {**sharding.axes, REPLICAS: replicas}, own_elements, dtype)
    workers, members = range(num_workers), seats.workers + seats.servers
    named = [NamedLayout(layout, f"part {part}.") for part in range(num_parts if needs.mailbox else 0)]
    replicas = range(seats.workers if num_parts > 1 and sharding is not None and sharding.lengths else 0)
    sized = layout, own_elements, num_workers
    return ArenaPlan(
        num_workers=num_workers,
        num_servers=num_servers,
        num_elements=num_elements,
        dtype=dtype,
        needs=needs,
        control=control,
        shared=shared,
        collectives=SharedMemoryCollectives.reserve(*sized, dtype=dtype) if needs.collectives else None,
        views=SharedViews.reserve(*sized) if needs.views else None,
        newcomers=(
            SharedNewcomers.reserve(*sized) if (needs.collectives or needs.views) and sharding is None else None
        ),
        staleness=SharedStalenessCounts.reserve(layout),
        rings=tuple(RecordRing.reserve(layout, capacity=_RING_RECORDS, name=f"ring {one}") for one in workers),
        orders=tuple(
            RecordRing.reserve(layout, capacity=_RING_RECORDS, name=f"order {one}", rows=ORDER)
            for one in (workers if needs.order and sharding is None else ())
        ),
        epoch_claims=SharedEpochClaims.reserve(layout, num_workers),
        stores=tuple(SharedStore.reserve(one, members) for one in named),
        mates=tuple(SharedStore.reserve(NamedLayout(layout, f"replica {one}."), num_parts) for one in replicas),
        rounds=tuple(layout.words(f"rounds {n}", 1) for n in range(seats.workers if num_parts > 1 else 1)),
        seats=seats,
        ended=layout.words("ended", num_workers),
        extra={
            name: (layout.reserve(name, max(8, _num_bytes(shape, kind_)), alignment_bytes=64), shape, kind_)
            for name, (shape, kind_) in extra.items()
        },
        sharding=sharding,
        memory_order=memory_order,
        axes=axes,
        size_bytes=layout.size_bytes,  # of all areas above
    )


class Arena:
    """One participant's view of the run's memory.

    Args:
        participant_id: workers' ids come first, then servers', then the evaluator's.
    """

    def __init__(self, segment: Segment, plan: ArenaPlan, participant_id: int, incarnation: int = 0) -> None:
        self.segment = segment
        self.plan = plan
        self.participant_id, self._incarnation = participant_id, incarnation
        self._addresses = {
            name: segment.address + plan.control + _CONTROL_STRIDE_BYTES * index
            for index, name in enumerate(_CONTROL_WORDS)
        }
        abort = self._addresses["abort"]
        options: dict[str, Any] = {"kind": plan.needs.lock} if plan.needs.kind == "locked" else {}
        if plan.needs.kind == "replicated":
            options = {"own_models": plan.needs.own_models}
        self.shared: Any = _kind(plan.needs, plan.sharding)(
            segment, plan.shared, participant_id, incarnation, abort, **options
        )
        if plan.needs.averaged:
            averages = [name for name in plan.extra if name.startswith(AVERAGE)]
            self.shared.buffers = [(self.extra(name.removeprefix(AVERAGE)), self.extra(name)) for name in averages]
        who = participant_id, incarnation, abort
        self.collectives = self.views = self.newcomers = None
        if plan.collectives is not None:
            self.collectives = SharedMemoryCollectives(segment, plan.collectives, *who)
        if plan.views is not None:
            self.views = SharedViews(segment, plan.views, *who)
        if plan.newcomers is not None:
            self.newcomers = SharedNewcomers(segment, plan.newcomers, *who)
            self.newcomers.place = self.group.place
        self.axes = Axes(segment, plan.axes, participant_id, abort) if plan.axes is not None else None
        self.staleness = SharedStalenessCounts(segment, plan.staleness)

    def address(self, word: str) -> int:
        """Address of a control word.

        "epoch" is the newest epoch that a loop under `attach` entered; "final" is 1 once all workers have ended and the vector
        is the run's result, 2 if worker 0's loop has written that result.
        """
        return self._addresses[word]

    def load(self, word: str) -> int:
        return atomics.load(self._addresses[word])

    def store(self, word: str, value: int) -> None:
        atomics.store(self._addresses[word], value)

    def add(self, word: str, value: int) -> None:
        atomics.fetch_add(self._addresses[word], value)

    @property
    def group(self) -> Any:
        """What knows which workers take part in rounds; None: the method has none."""
        return self.views or self.collectives

    def mark_ended(self, worker_id: int) -> None:
        """Marks a worker that makes no further update: its program has ended, or it has died for good."""
        atomics.store(self._ended(worker_id), 1)

    def mark_back(self, worker_id: int) -> None:
        """Marks a dead worker's replacement as one that makes updates."""
        atomics.store(self._ended(worker_id), 0)

    def mark_gone(self, worker_id: int, incarnation: int = 0, *, others_continue: bool = False) -> None:
        """Marks a worker that has left as ended, so that no worker waits for it, nor for worker 0's final weights.

        If `others_continue`, it is dead, their rounds go on without it, and another one writes the final weights.
        """
        if others_continue and self.group is not None:
            self.group.mark_lost(worker_id, incarnation, is_dead=True)
        self.mark_lost(worker_id, incarnation)
        self.mark_ended(worker_id)
        if not self.load("final") and (self.all_ended() if others_continue else not worker_id):
            self.store("final", 1)

    def mark_lost(self, worker_id: int, incarnation: int = 0) -> None:
        """Tells the others that this worker takes part in no further round."""
        if self.group is not None:
            self.group.mark_lost(worker_id, incarnation)
        if self.axes is not None:
            self.axes.mark_lost(worker_id)

    def all_ended(self) -> bool:
        return all(map(self.has_ended, range(self.plan.num_workers)))

    def has_ended(self, worker_id: int) -> bool:
        """Whether this worker makes no further updates; it may still wait for the others."""
        return atomics.load(self._ended(worker_id)) != 0

    def _ended(self, worker_id: int) -> int:
        return self.segment.address + self.plan.ended + LINE_BYTES * worker_id

    def stop(self, *, at_once: bool) -> None:
        """Asks every worker to end at its next step or wait; if not `at_once`, all after the same round."""
        if not at_once:
            for offset in self.plan.rounds:
                Rounds.close(self.segment.address + offset)
            return
        self.store("abort", 1)
        wake(self.address("go"))
        wake(self.address("abort"))

    @property
    def is_stopped(self) -> bool:
        return bool(self.load("abort") or atomics.load(self.segment.address + self.plan.rounds[0]) & 1)

    @property
    def furthest_round(self) -> int:
        """The furthest round that any worker has asked for; with a divided model, any worker of the first group."""
        return atomics.load(self.segment.address + self.plan.rounds[0]) >> 1

    def rounds_address(self) -> int:
        """Address of the word for `Rounds` of this worker's group: of all workers, or of its replica of a divided model."""
        group = self.plan.seats.of(self.participant_id).member % len(self.plan.rounds)
        return self.segment.address + self.plan.rounds[group]

    def ring(self, worker_id: int) -> RecordRing:
        return RecordRing(self.segment, self.plan.rings[worker_id])

    def order(self, worker_id: int) -> RecordRing | None:
        """The ring of what timing decides for a worker; None: nothing is recorded of that."""
        return RecordRing(self.segment, self.plan.orders[worker_id], ORDER) if self.plan.orders else None

    def epoch_claims(self) -> SharedEpochClaims:
        return SharedEpochClaims(self.segment, self.plan.epoch_claims, self.plan.num_workers)

    def shared_store(self, participant_id: int | None = None) -> SharedStore:
        """The store of the mailboxes of this (or another) participant's part."""
        seats = self.plan.seats
        part = seats.of(self.participant_id if participant_id is None else participant_id).part
        return SharedStore(self.segment, self.plan.stores[part], seats.workers + seats.servers)

    @property
    def division(self) -> str:
        """How the model is divided into parts that have servers; "": it is not."""
        sharding = self.plan.sharding
        return sharding.digest if sharding is not None and self.plan.seats.num_parts > 1 else ""

    def mates_store(self, worker: int) -> SharedStore:
        """The store of the mailboxes in which the parts of a worker's replica exchange messages."""
        seats = self.plan.seats
        return SharedStore(self.segment, self.plan.mates[seats.of(worker).member], seats.num_parts)

    def checkpointed(self, of: int | None = None) -> tuple[torch.Tensor, int]:
        """A copy of the parameters as checkpoints hold them, and its version: the parts in a row if each has servers.

        With `of`, the parameters are those of this worker's copy of the model.
        """
        if self.plan.seats.num_parts > 1:
            return self.shared.copies()
        x = torch.empty(self.plan.num_elements, dtype=self.plan.dtype)
        return x, self.shared.snapshot(x) if of is None else self.shared.model(of, x)

    def extra(self, name: str) -> torch.Tensor:
        """A named shared tensor; a new tensor object at every call."""
        offset, shape, dtype = self.plan.extra[name]
        return self.segment.tensor(offset, shape, dtype)

    def ports(self, clock: RealClock, seed: int) -> Ports[Any]:
        return Ports(**self._given(clock, seed))

    def server_ports(self, clock: RealClock, seed: int) -> ServerPorts:
        return ServerPorts(**self._given(clock, seed), copies=self.plan.needs.copies > 1)

    def _given(self, clock: RealClock, seed: int) -> dict[str, Any]:
        clock.stopped = lambda: bool(self.load("abort"))
        seats = self.plan.seats
        order = self.order(self.participant_id) if self.participant_id < self.plan.num_workers else None
        decided = {"decided": OrderWriter(order.append, self._incarnation)} if order is not None else {}
        return {
            **decided,
            "worker_id": seats.of(self.participant_id).member,
            "num_workers": seats.workers,
            "clock": clock,
            "random": Random(f"{seed}/{self.participant_id}"),
            "shared": self.shared,
            "staleness": self.staleness,
            "collectives": self.collectives,
            "views": self.views,
            "newcomers": self.newcomers,
            "incarnation": self._incarnation,
            "num_servers": self.plan.num_servers // seats.num_parts,
        }

    def waits(self, clock: RealClock) -> list[Any]:
        """Everything whose `waited_s` is this worker's waiting time."""
        ports = (self.shared, self.collectives, *(self.axes.along.values() if self.axes is not None else ()))
        return [clock, *(port for port in ports if hasattr(port, "waited_s"))]


_KINDS: dict[str, Any] = {
    "racing": RacingVector,
    "locked": LockedVector,
    "slots": SlotPool,
    "replicated": ReplicatedVector,
    "served": ServedVector,
}


def _kind(needs: Needs, sharding: Sharding | None) -> Any:
    if sharding is None:
        return _KINDS[needs.kind]
    return ServedParts if needs.kind == "served" else ShardedVectors


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
