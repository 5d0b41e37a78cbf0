"""A worker that torchrun or another launcher started: with its own memory, collectives or messages, and no supervisor."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import torch
from torch import nn

from paceline.algorithms import Algorithm, registry
from paceline.algorithms.server.client import Client
from paceline.errors import UsageError
from paceline.membership.environment import LaunchedEnvironment
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.membership.launched import LaunchedRun, check_algorithm
from paceline.membership.peers import mailbox_part
from paceline.membership.rendezvous import address_of
from paceline.memory.seats import Seats
from paceline.optim.flat import FlatBinding, model_words
from paceline.optim.frozen import FrozenParameters
from paceline.optim.model_state import dense_buffers, state_of
from paceline.records import checkpoint_files
from paceline.records.checkpoint_contents import Parameters
from paceline.records.step_record import PackedRecords
from paceline.system.interrupts import DeferredTermination
from paceline.system.uncaught import say
from paceline.worker.gathering import StoreGatherer
from paceline.worker.hosted_servers import HostedServers
from paceline.worker.memberships.layout_part import Division, ShardedLayoutPart
from paceline.worker.memberships.membership import BatchShare, LoopState, Membership
from paceline.worker.memberships.memory import WorkerMemory, copies_of, own_arena
from paceline.worker.memberships.written import write_end, write_state
from paceline.worker.storage import WorkerStorage


class LaunchedMembership(Membership):
    """A worker that starts with worker 0's model.

    Each worker keeps its own buffers, and worker 0's are the run's. A parameter server's shards are threads of worker 0, or,
    if each part of a divided model has servers, of the first worker with that part.

    Raises:
        UsageError: these workers cannot run the algorithm, or they disagree.
        WorkerLostError: a worker did not arrive within the deadline.
    """

    def __init__(
        self,
        environment: LaunchedEnvironment,
        model: nn.Module,
        algorithm: Algorithm,
        random_states: tuple[int, ...] = (),
        *_: Any,
        layout: Division | None = None,  # how the model is divided among workers; None: it is not
        plan: str = "none",  # a placed model's, as text that differs from other plans'
    ) -> None:
        self._environment = environment
        self._algorithm = algorithm
        self._is_divided = layout is not None
        self._next_batch = 0
        self._incomplete: int | None = None  # a checkpoint that not all workers have written
        self.worker_id, self.num_workers = environment.worker_id, environment.num_workers
        self.random_states = random_states
        self.deals_batches = not environment.own_data
        folder, resume = environment.checkpoint, environment.resume
        self.resumed_from = resume.name if resume is not None else ""
        self._resumed = int(self.resumed_from or 0)
        self.binding = FlatBinding(model.parameters(), on_any_device=True)
        copies = copies_of(self.binding, algorithm)
        spec = registry.spec(algorithm)
        if not algorithm.same_batches:
            check_algorithm(spec, algorithm.needs)
        if folder is not None and not algorithm.in_rounds:
            raise UsageError(
                f"PACELINE_CHECKPOINT needs an algorithm that trains in rounds, but {spec} does not: leave it out, or "
                "use paceline.launch, which writes checkpoints for all algorithms."
            )
        if layout is not None and copies is not None:
            raise UsageError("Layouts support only models on the CPU: move the model there with model.cpu().")
        buffers = dense_buffers(model)
        alike, frozen = algorithm.survivors_have_all, FrozenParameters(model) if layout is None else None
        self._storage = WorkerStorage(self.worker_id, resume, folder, makes_same_updates=alike, frozen=frozen)
        self._first_version = self._read_checkpoint(buffers)
        self._left = self._storage.left(self._next_batch)
        gpu = copies.device_name if copies is not None and algorithm.needs.collectives else None
        words = {
            "algorithm": spec,
            "model": model_words(model),
            "checkpoint": self.resumed_from or "none",
            "kind of device": self.binding.device.type,
            "layout": layout.spec if layout is not None else "none",
            "plan": plan,
        }
        self._run = run = LaunchedRun(environment, words, gpu, random_states, list(state_of(model).values()))
        self.tables = run.tables
        if folder is not None:
            name = torch.tensor([secrets.randbits(62)])
            if self.worker_id == 0:
                checkpoint_files.begin(folder, str(int(name)), keep=resume)
            run.collectives.broadcast(name)  # the others save nothing before
            self._run_name = str(int(name))
            self.saves_after_loss = algorithm.together and algorithm.takes_any_workers and layout is None
        if gpu is not None:  # report NCCL errors here, and not within a backward pass
            run.collectives.start_all_reduce(torch.zeros(1, device=self.binding.device)).wait()
        self._records = records = PackedRecords()
        if layout is not None:
            self.part = layout.part(model, self.worker_id, self.num_workers, self.seed)
            self.binding = self.part.binding
            self.fetches_ahead = not algorithm.serves_parts  # parts agree on each batch as the loop gets it
        self._memory = memory = self._make_memory(buffers, copies, records)
        if self.part is not None:
            memory.ports = self.part.begin(memory.ports, run.axes(self.part.axes), algorithm)
        self.ports, self.replica, self.own_records = memory.ports, memory.replica, records.array
        self._sigterm = sigterm = DeferredTermination()
        self.stopped, self.snapshot = lambda: bool(sigterm) or memory.stopped(), memory.snapshot
        self.raise_if_terminated = run.collectives.on_wait = end = sigterm.raise_if_any
        self.gatherer = StoreGatherer(run.store, self.worker_id, self.num_workers, environment.deadline_s, end)

    def _read_checkpoint(self, buffers: dict[str, torch.Tensor]) -> int:
        """Loads the checkpoint's parameters and buffers into the model; returns their version."""
        any_number = self._algorithm.takes_any_workers and not self._is_divided
        saved = self._storage.load_parameters(self.binding, buffers, None if any_number else self.num_workers)
        if saved is None:
            return 0
        self._next_batch = saved.next_batch
        with torch.no_grad():
            for parameter, view in zip(self.binding.parameters, self.binding.views(saved.x), strict=True):
                parameter.copy_(view)
            for name, buffer in saved.buffers.items():
                buffers[name].copy_(buffer)
        return saved.version

    def _make_memory(self, buffers: dict[str, torch.Tensor], copies: Any, records: PackedRecords) -> WorkerMemory:
        algorithm, run, part = self._algorithm, self._run, self.part
        is_served = algorithm.needs.kind == "served"
        num_parts = part.sharding.parts if is_served and part is not None and part.sharding is not None else 1
        seats = Seats(num_parts, self.num_workers, 0)
        seat = seats.of(self.worker_id)
        places = {"num_workers": seats.workers, "worker_id": seat.member} if is_served else {}
        arena = own_arena(self.binding, algorithm, is_private=copies is not None, **places, version=self._first_version)
        memory = WorkerMemory(
            self.binding, buffers, algorithm, arena, storage=self._storage, recorder=records, copies=copies
        )
        run.collectives.counts = memory.ports.counts
        memory.ports = replace(
            memory.ports,
            worker_id=seat.member,
            num_workers=seats.workers,
            random=Random(f"{self.seed}/{self.worker_id}"),
            collectives=run.collectives if algorithm.needs.collectives else None,
        )
        self._servers: HostedServers | None = None
        if algorithm.needs.mailbox:
            host, key = address_of(run.store, self.worker_id, self.num_workers, run.deadline_s)
            store = mailbox_part(run.store, seat.part)
            if memory.ports.num_servers and not seat.member:
                self._servers = HostedServers(algorithm, arena, store, self.seed, host=host, key=key)
            memory.meet(store, host, key)
        return memory

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        return self._storage.load_worker(optimizer, self.ports.shared, sizes=not self._algorithm.splits_update)

    def batches(self) -> BatchShare:
        share = BatchShare(self._run.claims(), self._left)
        return share if self.part is None else share._replace(agreed=self.part.agreed)

    def begin_epoch(self, epoch: int | None, first_batch: int, state: LoopState, *, leads: bool, step: int = 0) -> None:
        """As in `Membership`; every epoch is saved, if any is, but for those that the run has resumed from."""
        if epoch is not None and first_batch > self._resumed and self._environment.checkpoint is not None:
            own_model = self.ports.shared if self._algorithm.gossip else None
            values = self._parameters(first_batch)
            self._storage.save(first_batch, state, own_model, values if leads else None)
            self._incomplete = first_batch if leads else self._incomplete

    def _parameters(self, next_batch: int) -> Callable[[], Parameters]:
        """A function that makes a checkpoint's parameters. Under a layout, gathers the parts of worker 0's model now."""
        part, memory = self.part, self._memory
        if part is None or part.sharding is None or self.worker_id >= part.sharding.parts:
            return lambda: memory.parameters(next_batch)
        own = memory.parameters(next_batch)
        whole = replace(own, x=cast(ShardedLayoutPart, part).whole_of(own.x))  # no placed model has a layout here
        return lambda: whole

    def before_batch(self) -> None:
        """As in `Membership`; from the first batch on, SIGTERM ends the worker after its step."""
        if self.saves_after_loss:
            self._sigterm.begin()
        if self._incomplete is not None and self._storage.complete(self._incomplete, self.num_workers):
            self._incomplete = None

    @property
    def is_terminated(self) -> bool:
        return bool(self._sigterm)

    def save_after_loss(self, state: LoopState) -> None:
        """As in `Membership`: the first worker that comes here saves the run, as all have the same parameters and state.

        Workers may be a step apart, and differ in what they drew and in buffers. A loop on batches of its own has none left
        to tell of, and saves nothing.
        """
        folder, left = self._environment.checkpoint, state.left
        if (
            left is None
            or left == self._left
            or folder is None
            or not checkpoint_files.claim_end(folder, self._run_name)
        ):
            return
        # No worker begins an epoch of that number: others are a step ahead at most.
        least = left.first + self.num_workers + 1
        written = self._storage.save_alone(state, self._memory.parameters(left.least), least)
        if written is not None:
            why = "SIGTERM" if self.is_terminated else "A worker was lost"
            say(
                f"{why}: worker {self.worker_id} has written a checkpoint of the last step, {written}. The next start"
                " resumes there, with any number of workers."
            )

    def has_updates(self) -> bool:
        """As in `Membership`; the worker's own memory says nothing about others' models."""
        return not self._algorithm.gossip and self.ports.shared.version > self._first_version

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        self.snapshot(out)
        mean = None
        if self.ports.num_servers:
            Client(self.ports, fetched=self.ports.fetched).final()
            out.copy_(self.ports.shared.x)
        if self._algorithm.gossip:
            mean = self._memory.final_mean(out, self._environment.deadline_s, given, left)
        sends_left = self._algorithm.gossip and self._algorithm.needs.mailbox  # with the mean
        if not sends_left and self._run.hears_of_left(left is not None):
            if left is not None:
                out.copy_(left.x)
            self._run.start_from_worker_0([out, *(one.detach() for one in self._memory.buffers.values())])
        return mean

    def write_end(self, model: nn.Module, mean: FinalMean | None) -> None:
        """As in `Membership`; worker 0's buffers are the run's."""
        folder = self._environment.out
        if folder is not None:
            write_end(folder, self.worker_id, self._records.array(), model if self.worker_id == 0 else None)
            figures: dict[str, Any] = {"algorithm": registry.spec(self._algorithm), "notes": [], "batches_not_given": 0}
            figures["unresolved_exchanges"] = self.ports.counts.unresolved_exchanges
            figures["models_in_mean"] = mean.num_models if mean is not None else 0
            figures["consensus_distance"] = mean.consensus_distance if mean is not None else None
            write_state(folder, self.worker_id, 0, "ended", **figures)

    def close(self, *, failed: bool) -> None:
        self._sigterm.end()
        self._memory.close()
        self._run.close(failed=failed)
        folder = self._environment.checkpoint
        if folder is not None and not (failed or self.worker_id):
            checkpoint_files.claim_end(folder, self._run_name)
        if self._servers is not None:
            self._servers.close()
