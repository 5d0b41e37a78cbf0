"""A worker's model, the arena that holds its parameters, and the ports that its program gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.loop.buckets import bucket_bytes_for
from paceline.loop.device_replica import DeviceReplica
from paceline.loop.replica import AttachedReplica
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights, take_final_mean
from paceline.membership.peers import Peers
from paceline.memory.arena import Arena, plan_arena
from paceline.memory.mirrored import MirroredVector
from paceline.memory.rounds import Rounds
from paceline.memory.segment import Segment
from paceline.optim.flat import FlatBinding
from paceline.optim.frozen import FrozenParameters
from paceline.optim.ranges import Ranges
from paceline.ports.ports import Mailbox, Ports, Storage
from paceline.ports.private import PrivateVector
from paceline.records import checkpoint_contents as checkpoint
from paceline.records.step_record import Recorder
from paceline.system.clock import RealClock
from paceline.transport.device import CudaCopies, StagedCollectives, StagedMailbox, device_copies

_ON_HOST = ("racing", "locked", "slots")  # kinds of parameters that workers share in the host's memory


@dataclass(eq=False)
class WorkerMemory:
    """The memory in which a worker trains: the run's, or its own."""

    binding: FlatBinding
    buffers: dict[str, torch.Tensor]  # the model's dense buffers, by name
    algorithm: Algorithm
    arena: Arena
    seed: int = 0
    incarnation: int = 0
    storage: Storage | None = None  # of the program; None: it saves nothing
    recorder: Recorder | None = None  # takes the records; None: they are not kept
    slow: float = 1.0  # how many times as long gradients take
    copies: CudaCopies | None = None  # to and from the GPU that the model is on; None: it is on the CPU
    frozen: FrozenParameters | None = None  # which newcomers get from this worker's replica; None: they do not

    def __post_init__(self) -> None:
        algorithm, arena = self.algorithm, self.arena
        self.peers: Peers | None = None  # the other workers, once connected
        self.mates: Peers | None = None  # those with the other parts of this replica, if they exchange messages
        self._clock = RealClock()
        self.ports: Ports[Any] = replace(arena.ports(self._clock, self.seed), storage=self.storage)
        in_rounds = algorithm.in_rounds or arena.plan.seats.num_parts > 1
        self._rounds = Rounds(arena.address("abort"), arena.rounds_address() if in_rounds else 0)
        self.stopped = self._rounds.stopped

    def aborted(self) -> bool:
        """Whether the run is being stopped in the middle of a round, so that no worker waits for another."""
        return self.arena.load("abort") != 0

    def snapshot(self, out: torch.Tensor, *left_out: Ranges) -> int:
        """Copies the newest parameters into `out` (P,), but for ranges that are `left_out`; returns their version."""
        if self.arena.plan.sharding is not None:
            return self.arena.shared.copy_of(self.arena.participant_id, out)
        return self.arena.shared.snapshot(out, *left_out)

    def parameters(self, next_batch: int) -> checkpoint.Parameters:
        """A copy of the current parameters and buffers, for a checkpoint that continues at `next_batch`."""
        x, version = self.arena.checkpointed()
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in self.buffers.items()}
        return checkpoint.Parameters(x, version, next_batch, buffers, self.arena.division, self.arena.plan.memory_order)

    def meet(
        self, store: Any, host: str | None = None, key: Path | None = None, *, patience_s: float | None = None
    ) -> None:
        """Connects to the other workers and the servers through a store; `patience_s` overrides the algorithm's."""
        peers = Peers(
            store,
            self.ports.worker_id,
            self.ports.num_workers,
            self.ports.counts,
            self.aborted,
            incarnation=self.incarnation,
            num_servers=self.arena.plan.seats.servers,
            host=host,
            key=key,
            patience_s=self.algorithm.patience_s if patience_s is None else patience_s,
        )
        self.has_met(peers, self.incarnation)

    def meet_mates(self, patience_s: float) -> Mailbox:
        """Connects to the workers with the other parts of this replica; call it after `meet`."""
        arena, worker = self.arena, self.arena.participant_id
        part, num_parts = arena.plan.seats.of(worker).part, arena.plan.seats.num_parts
        self.mates = Peers(
            arena.mates_store(worker), part, num_parts, self.ports.counts, self.aborted, patience_s=patience_s
        )
        return self.mates.mailbox

    def has_met(self, peers: Peers, incarnation: int) -> None:
        """Makes the program talk to these peers from now on, as this `incarnation`."""
        self.peers = peers
        mailbox: Any = peers.mailbox
        if self.copies is not None:
            peers.concurrency.around = self.copies.here()
            mailbox = StagedMailbox(peers.mailbox, self.copies)
        self.ports = replace(self.ports, mailbox=mailbox, concurrency=peers.concurrency, incarnation=incarnation)

    def base_arguments(self) -> dict[str, Any]:
        needs, peers = self.algorithm.needs, self.peers
        others: list[Any] = [peers.mailbox, peers.concurrency] if peers is not None else []
        others += [self.mates.mailbox] if self.mates is not None else []
        if self.ports.collectives is not self.arena.collectives:
            others.append(self.ports.collectives)
        return {
            "binding": self.binding,
            "recorder": self.recorder,
            "waits": [*self.arena.waits(self._clock), *others],
            "staleness": self.arena.staleness if needs.staleness_counts else None,
            "stopped": self.stopped,
            "rounds": self._rounds,
            "counts": self.ports.counts if needs.mailbox or needs.collectives else None,
            "incarnation": self.incarnation,
            "bucket_bytes": bucket_bytes_for(self.ports.num_workers, needs.bucket_bytes),
            "slow": self.slow,
        }

    def replica(self, optimizer: torch.optim.Optimizer) -> AttachedReplica:
        alone, lockstep = self.ports.num_workers == 1, self.algorithm.lockstep
        kind = DeviceReplica if self.copies is not None and self.algorithm.needs.kind in _ON_HOST else AttachedReplica
        return kind(optimizer, alone=alone, lockstep=lockstep, frozen=self.frozen, **self.base_arguments())

    def final_mean(
        self, out: torch.Tensor, deadline_s: float, given: BatchesTaken, left: LeftWeights | None
    ) -> FinalMean | None:
        """Replaces `out` (P,) by the mean of all workers' models, without a supervisor."""
        ports, buffers = self.ports, [one.detach() for one in self.buffers.values()]
        if out.is_cpu or self.peers is None:
            return take_final_mean(ports, out, deadline_s, given, buffers, left)
        host = out.cpu()  # the collector has all models at once, for which a GPU may be too small
        if left is not None:
            left = LeftWeights(left.x.cpu(), [one.cpu() for one in left.buffers])
        ports = replace(ports, mailbox=self.peers.mailbox)
        mean = take_final_mean(ports, host, deadline_s, given, buffers, left)
        out.copy_(host)
        return mean

    def close_peers(self) -> None:
        if self.mates is not None:
            self.mates.close()
        if self.peers is not None:
            self.peers.close()
        self.peers = self.mates = None

    def close(self) -> None:
        """Gives the model its own memory again."""
        self.close_peers()
        if self.ports.storage is not None:
            self.ports.storage.keep(dict, 0)
        # They refer to this object, which has its memory.
        self.ports = replace(self.ports, mailbox=None, concurrency=None)
        self.binding.release()


def copies_of(
    binding: FlatBinding, algorithm: Algorithm, kinds: Sequence[str] = ("replicated", "served")
) -> CudaCopies | None:
    """Copies to and from the GPU that the model is on; None: it is on the CPU.

    Raises:
        UsageError: the algorithm's kind of parameters is not among the `kinds` that may lie on a GPU.
    """
    copies = device_copies(binding.device)
    if copies is not None and algorithm.needs.kind not in kinds:
        raise UsageError(
            f"{registry.spec(algorithm)} keeps the parameters in the CPU's memory: move the model there with model.cpu(), or"
            " choose all-reduce, local-sgd, d-psgd, ad-psgd or parameter-server, which train on GPUs."
        )
    return copies


def copies_in_launch(
    binding: FlatBinding, algorithm: Algorithm, num_workers: int, *, is_divided: bool
) -> CudaCopies | None:
    """As `copies_of`, for workers that share memory.

    Raises:
        UsageError: a model or its update is divided among workers, or the only worker has the servers' vector.
    """
    copies = copies_of(binding, algorithm, kinds=(algorithm.needs.kind,))
    if copies is None:
        return None
    if is_divided:
        raise UsageError("Layouts support only models on the CPU: move the model there with model.cpu().")
    if algorithm.splits_update or (algorithm.needs.kind == "served" and num_workers == 1):
        alone = " for a lone worker" if num_workers == 1 else ""
        raise UsageError(
            f"{registry.spec(algorithm)} needs the model on the CPU{alone} under paceline.launch: move it there with"
            " model.cpu(), or start the workers with torchrun."
        )
    return copies


def put_on_device(arena: Arena, binding: FlatBinding, copies: CudaCopies) -> None:
    """Gives a worker that shares memory a vector on its device, with averages on the host.

    Does nothing if all workers train one vector on the host.
    """
    if arena.plan.needs.kind in _ON_HOST:
        return
    x = binding.zeros()
    if arena.plan.num_servers:
        arena.shared.x = x
        return
    arena.shared = MirroredVector(arena.shared, x)
    if arena.collectives is not None and arena.plan.num_workers > 1:
        staged: Any = StagedCollectives(arena.collectives, copies)
        arena.collectives = staged


def own_arena(
    binding: FlatBinding,  # the model's parameters
    algorithm: Algorithm,  # how the workers agree
    *,
    # Whether the parameters are a plain vector on the model's device, without atomic operations: on a GPU, or without
    # other workers. Servers have theirs on the CPU, and this worker a copy on the model's device.
    is_private: bool = False,
    num_workers: int = 1,  # that have places in it: all, if servers hold the vector
    worker_id: int = 0,  # this worker's place
    version: int = 0,  # of the parameters
) -> Arena:
    """This worker's own memory, with the model's parameters; other workers get only messages."""
    needs = algorithm.needs._replace(views=False, order=False)  # no supervisor says who has died, or records
    plan = plan_arena(
        needs,
        num_workers=num_workers,
        num_elements=binding.num_elements,
        dtype=binding.dtype,
        memory_order=binding.memory_order,
        extra={},
    )
    arena = Arena(Segment.create(plan.size_bytes), plan, participant_id=worker_id)
    x = binding.zeros()
    binding.read(x)
    if plan.num_servers:
        arena.shared.initialise(None if worker_id else x, version)  # worker 0 hosts the servers
        arena.shared.keep_copy(x)
    elif is_private:
        arena.shared = PrivateVector(x, version)
    else:
        arena.shared.initialise(x, version)
    if plan.stores:
        arena.shared_store().begin()
    return arena
