"""One worker's membership in a run: its model on shared memory, its ports, its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.checkpoint import contents as checkpoint
from paceline.errors import PeerLostError, UsageError
from paceline.membership.elastic import JoinedRun
from paceline.membership.environment import WorkerEnvironment
from paceline.membership.final_mean import FinalMean, Given, LeftWeights
from paceline.membership.launched import Membership, check_algorithm, check_off_cpu, ports_for
from paceline.membership.peers import Peers, mailbox_part
from paceline.memory.arena import Arena, plan_arena
from paceline.memory.private import PrivateVector
from paceline.memory.segment import Segment
from paceline.ports.ports import Message
from paceline.ports.shared import AVERAGE
from paceline.records.step_record import PackedRecords
from paceline.system.clock import RealClock
from paceline.transport.device import StagedMailbox, copies_for
from paceline.vectors.flat import FlatBinding, model_words
from paceline.vectors.half_types import sum_type
from paceline.worker.final_model import agree_on_final
from paceline.worker.hosted_servers import HostedServers
from paceline.worker.process import Hello, join_run
from paceline.worker.storage import WorkerStorage, save_or_tell
from paceline.worker.tables import tables, tell_random_states

__all__ = ["Session"]


class Session:
    """What one worker holds between joining a run and leaving it.

    Args:
        model: its trainable parameters become views of the shared vector; its buffers are shared (see below).
        algorithm: how the workers agree.
        environment: who this worker is; None: alone, in memory of its own.
        shared_state: shapes of optimizer state that all workers share, by name; empty: each keeps its own.
        extra: further tensors of the arena.

    Buffers (running statistics) are one shared copy that all workers write, the last writer winning; in lockstep, and under
    launchers that are not ours, every worker keeps its own and worker 0's are the run's.

    A model on a GPU keeps its vector and its buffers there. No other process sees them: what others get travels as messages,
    through pinned memory, or by collectives.

    Raises:
        UsageError: the model is on a GPU and the algorithm, or the launcher, needs it in memory that workers share.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        environment: WorkerEnvironment | None,
        shared_state: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
        extra: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.environment = environment
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        self._copies = copies_for(self.binding.device)
        if self._copies is not None:
            check_off_cpu(registry.spec(algorithm), algorithm.memory, environment)
        self.worker_id = environment.worker_id if environment is not None else 0
        self._resume = environment.resume if environment is not None else None
        self._initial_version = 0
        self._options: Mapping[str, Any] = environment.options if environment is not None else {}
        self._shared_state = shared_state or {}
        self._buffers = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        self.clock = RealClock()
        self.tell_epoch: Callable[[int], None] = lambda samples: None  # called with about how many an epoch has
        buffers = {name: (tuple(b.shape), b.dtype) for name, b in self._buffers.items()}
        extra = buffers | dict(extra or {}) | self._shared_state
        self._averages = (
            [name for name, b in self._buffers.items() if b.is_floating_point()] if algorithm.memory.averaged else []
        )
        extra |= {AVERAGE + name: (extra[name][0], sum_type(extra[name][1])) for name in self._averages}
        extra |= tables(environment.num_workers if environment is not None else 1)
        hello = Hello(
            algorithm=registry.spec(algorithm),
            num_elements=self.binding.num_elements,
            num_parameters=self.binding.num_parameters,
            dtype=self.binding.dtype,
            shapes=tuple(self.binding.describe()),
            extra=extra,
        )
        self.membership: Membership | JoinedRun | None = None
        self.peers: Peers | None = None
        if environment is not None and environment.supervised:
            self.arena = join_run(environment, hello, self._write_initial, partial(tell_random_states, environment))
        else:
            if environment is not None:
                self.membership = self._meet(environment, hello)
            self.arena = self._arena_of_its_own(hello)
        self._bind_buffers()
        self.ports = self.arena.ports(self.clock, environment.seed if environment is not None else 0)
        if environment is not None and isinstance(self.membership, Membership):
            self.ports = ports_for(environment, algorithm.memory, self.ports, self.membership)
        elif isinstance(self.membership, JoinedRun) and self.peers is not None:
            self.ports = self.membership.ports(self.ports, self.peers)
        if isinstance(self.membership, JoinedRun):
            self.membership.heed_signals(lambda: self.arena.store("abort", 1))
        self._storage = WorkerStorage(self._resume, self.worker_id)
        self.ports = replace(self.ports, storage=self._storage)
        self.ring = self.arena.ring(self.arena.participant_id)
        self.records = PackedRecords() if self.membership is not None else None  # there is no supervisor to read a ring
        self.servers: HostedServers | None = None
        if algorithm.memory.mailbox and self.peers is None:
            self._meet_peers()
        if self._copies is not None and self.peers is not None:
            self.peers.concurrency.around = self._copies.here()
            self.ports = replace(self.ports, mailbox=StagedMailbox(self.peers.mailbox, self._copies))

    def _meet_peers(self) -> None:
        environment, membership = self.environment, self.membership
        assert not isinstance(membership, JoinedRun)
        host, key = membership.address() if membership is not None else (None, None)
        store = mailbox_part(membership.store) if membership is not None else self.arena.shared_store()
        if membership is not None and environment is not None and self.ports.num_servers and not self.worker_id:
            self.servers = HostedServers(self.algorithm, self.arena, store, environment.seed, host=host, key=key)
        self.peers = Peers(
            store,
            self.ports.worker_id,
            self.ports.num_workers,
            self.ports.counts,
            self.stopped,
            incarnation=environment.incarnation if environment is not None else 0,
            num_servers=self.arena.plan.num_server_programs,
            host=host,
            key=key,
        )
        self.ports = replace(
            self.ports,
            mailbox=self.peers.mailbox,
            concurrency=self.peers.concurrency,
            incarnation=environment.incarnation if environment is not None else 0,
        )

    def _meet(self, environment: WorkerEnvironment, hello: Hello) -> Membership | JoinedRun:
        """Meets the workers that other launchers started, or that joined; takes worker 0's parameters and buffers."""
        tensors = [*(p.detach() for p in self.binding.parameters), *(b.detach() for b in self._buffers.values())]
        if environment.joined is not None:
            with torch.no_grad():
                self.peers = environment.joined.meet(tensors)
            return environment.joined
        check_algorithm(hello.algorithm, self.algorithm.memory)
        if environment.checkpoint is not None and not self.algorithm.lockstep:
            raise UsageError(
                "PACELINE_CHECKPOINT is for algorithms whose workers go through rounds together, and"
                f" {hello.algorithm} has none: leave it out, or use paceline.launch, whose checkpoints are for all."
            )
        if self._resume is not None:
            self._read_checkpoint(self._resume, environment.num_workers)
        gpu = self._copies.device_name if self._copies is not None and self.algorithm.memory.collectives else None
        membership = Membership(
            environment,
            {
                "algorithm": hello.algorithm,
                "model": model_words(self.model),
                "checkpoint": self._resume.name if self._resume is not None else "none",
                "kind of device": self.binding.device.type,
            },
            gpu,
        )
        if environment.checkpoint is not None and self.worker_id == 0:  # the others wait below, and save nothing before
            checkpoint.clear(environment.checkpoint, keep=self._resume)
        with torch.no_grad():
            membership.start_from_worker_0(tensors)
        if gpu is not None:  # what is wrong with NCCL is said here, and not within a backward pass
            membership.collectives.start_all_reduce(torch.zeros(1, device=self.binding.device)).wait()
        return membership

    def _read_checkpoint(self, resume: Path, num_workers: int) -> None:
        """Parameters and buffers of a checkpoint, into a model whose workers have no supervisor."""
        saved = self._load_checkpoint(resume, num_workers)
        self._initial_version = saved.version
        with torch.no_grad():
            for parameter, view in zip(self.binding.parameters, self.binding.views(saved.x), strict=True):
                parameter.copy_(view)
            for name, buffer in saved.buffers.items():
                self._buffers[name].copy_(buffer)

    def _arena_of_its_own(self, hello: Hello) -> Arena:
        served = self.algorithm.memory.kind == "served" and self.environment is not None
        plan = plan_arena(
            self.algorithm.memory,
            num_workers=self.environment.num_workers if served and self.environment is not None else 1,
            num_elements=hello.num_elements,
            dtype=hello.dtype,
            extra=hello.extra,
        )
        arena = Arena(Segment.create(plan.size_bytes), plan, participant_id=self.worker_id if served else 0)
        x = self.binding.zeros()
        self.binding.read(x)
        if self._copies is not None:
            arena.shared = PrivateVector(x, self._initial_version)
        else:
            arena.shared.initialise(x, self._initial_version)
        if plan.store is not None:
            arena.shared_store().begin()
        arena.store("checkpoint_epoch", -1)  # without a supervisor, every epoch is saved if any is
        if served:
            arena.shared.is_elsewhere = True
            arena.shared.x.copy_(x)
        for name, buffer in self._buffers.items():
            arena.extra(name).copy_(buffer)
        return arena

    def _write_initial(self, arena: Arena, x: torch.Tensor) -> None:
        """The parameters that the run starts from, into `x` (P,): the model's own, or the checkpoint's."""
        if self._resume is not None:
            saved = self._load_checkpoint(self._resume, arena.plan.num_workers)
            x.copy_(saved.x)
            buffers = saved.buffers
            if self._shared_state:
                self._write_shared_state(arena, checkpoint.load_optimizer_state(self._resume))
        else:
            self.binding.read(x)
            buffers = self._buffers
        for name, buffer in buffers.items():
            arena.extra(name).copy_(buffer)
        for name in self._averages:
            arena.extra(AVERAGE + name).copy_(buffers[name])

    def _load_checkpoint(self, resume: Path, num_workers: int) -> checkpoint.Parameters:
        same_workers = num_workers if self.algorithm.lockstep else None
        return checkpoint.load_fitting(resume, self.binding.num_elements, self.binding.dtype, same_workers)

    def _write_shared_state(self, arena: Arena, saved: dict[int, dict[str, torch.Tensor]]) -> None:
        for name in self._shared_state:
            _, index, key = name.split(" ")
            value = saved.get(int(index), {}).get(key)
            if value is not None:
                arena.extra(name).copy_(value)

    def _bind_buffers(self) -> None:
        if self._copies is not None or (self.algorithm.lockstep and self.worker_id != 0):
            return
        for name, buffer in self._buffers.items():
            buffer.data = self.arena.extra(name)

    def stopped(self) -> bool:
        """Whether the run is being stopped."""
        return self.arena.load("abort") != 0

    def base_arguments(self) -> dict[str, Any]:
        """What `BaseReplica` needs."""
        memory = self.algorithm.memory
        return {
            "binding": self.binding,
            "recorder": self.ring if self.records is None and self.environment is not None else self.records,
            "waits": [*self.arena.waits(self.clock), *self._peer_waits()],
            "staleness": self.arena.staleness if memory.staleness_counts else None,
            "stopped": self.stopped,
            "counts": self.ports.counts if memory.mailbox or memory.collectives else None,
            "incarnation": self.environment.incarnation if self.environment is not None else 0,
            "num_workers": self.ports.num_workers,
            "slow": self._options.get("slow", {}).get(self.worker_id, 1.0),
        }

    def has_updates(self) -> bool:
        """Whether a worker has made an update, as far as this one, which has made none, can know."""
        shared = self.arena.shared
        if self.algorithm.gossip:  # versions count averages, too; and memory of its own says nothing of the others
            return self.environment is not None and self.environment.supervised and any(shared.updates())
        return shared.version > max(self._initial_version, self.arena.load("initial_version"))

    def final_model(self, out: torch.Tensor, given: Given, left: LeftWeights | None) -> FinalMean | None:
        """Copies what the run ends with into `out` (P,), as `paceline.worker.final_model.agree_on_final` says."""
        return agree_on_final(self, out, given, left)

    @property
    def buffers_by_name(self) -> dict[str, torch.Tensor]:
        """The model's buffers, by their names in the arena."""
        return self._buffers

    def batch_claims(self) -> dict[str, Any]:
        """For `WorkerClaims`: the counts of claims, and from where on and without which batches a resumed run goes on."""
        if self.membership is None:
            assert self.environment is not None
            done = self._options.get("batches_done", ())
            first, is_late = self.arena.load("next_batch"), self.environment.incarnation > 0
            return {"counts": self.arena.epoch_claims(), "first": first, "done": done, "is_late": is_late}
        if isinstance(self.membership, JoinedRun):
            assert self.peers is not None
            return {"counts": self.membership.claims(self.peers), "is_late": True}
        return {"counts": self.membership.claims()}

    def own_records(self) -> np.ndarray | None:
        """This worker's records, where no supervisor has them."""
        return self.records.array() if self.records is not None else None

    def _peer_waits(self) -> list[Any]:
        return [self.peers.mailbox, self.peers.concurrency] if self.peers is not None else []

    def share_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the optimizer's state into shared memory: one momentum, one Adam step for all workers."""
        for name in self._shared_state:
            _, index, key = name.split(" ")
            parameter = optimizer.param_groups[0]["params"][int(index)]
            optimizer.state[parameter][key] = self.arena.extra(name)

    def save(self, number: int | None, optimizer: torch.optim.Optimizer, taken: int, *, parameters: bool) -> None:
        """Saves this worker's part of a checkpoint, as `save_or_tell` does.

        Args:
            number: the first batch of the epoch that begins; None: the run's end, whose parameters the supervisor saves.
            optimizer: whose state is saved.
            taken: batches that this worker has taken.
            parameters: whether this worker saves the parameters, too.
        """
        assert self.environment is not None
        save_or_tell(self.environment, number, lambda: self._save(number, optimizer, taken, parameters=parameters))

    def _save(self, number: int | None, optimizer: torch.optim.Optimizer, taken: int, *, parameters: bool) -> None:
        assert self.environment is not None
        folder = self.environment.checkpoint
        assert folder is not None
        self._storage.save(folder, number, optimizer, taken, self.arena.shared if self.algorithm.gossip else None)
        if parameters and number is not None:
            kept = self.arena.epoch_claims().least_kept()  # claimed ahead by a worker that is still in the epoch before
            next_batch = number if kept is None else min(kept, number)
            checkpoint.save_parameters(folder, number, self.parameters(next_batch))
            for server in range(self.ports.num_servers):
                assert self.peers is not None
                with contextlib.suppress(PeerLostError):  # this checkpoint then stays incomplete
                    self.peers.mailbox.send(self.ports.num_workers + server, Message("save", number))

    def parameters(self, next_batch: int) -> checkpoint.Parameters:
        """A copy of the parameters and buffers as they are now."""
        x = torch.empty(self.binding.num_elements, dtype=self.binding.dtype)
        version = self.arena.shared.snapshot(x)
        if self._copies is not None:
            buffers = {name: buffer.detach().cpu() for name, buffer in self._buffers.items()}
        else:
            buffers = {name: self.arena.extra(name).clone() for name in self._buffers}
        return checkpoint.Parameters(x, version, next_batch, buffers)

    def restore(self, optimizer: torch.optim.Optimizer, expect: Callable[[int], None] = lambda _: None) -> int:
        """Loads this worker's optimizer state, and its own model if it has one, from the checkpoint to resume.

        Args:
            optimizer: whose state.
            expect: called before, with how many parameters its first group had.

        Returns:
            the batches that it has taken so far.
        """
        before = self.environment.taken if self.environment is not None else 0
        if self._resume is None:
            return before
        self._storage.restore_model(self.arena.shared)
        return before + checkpoint.load_worker(self._resume, self.worker_id, optimizer, expect)

    def close(self, *, failed: bool = False) -> None:
        """Leaves the others and gives the model memory of its own again; the shared memory goes when its last user does."""
        self.arena.add("unresolved_exchanges", self.ports.counts.unresolved_exchanges)
        self.close_peers()
        if self.environment is not None and self.environment.supervised:
            self.arena.mark_gone(self.worker_id)
        if self.membership is not None:
            self.membership.close(failed=failed)
        if self.servers is not None:
            self.servers.close()
        self.binding.release()
        for buffer in self._buffers.values():
            buffer.data = buffer.data.clone()

    def close_peers(self) -> None:
        """Says goodbye to the other workers."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
