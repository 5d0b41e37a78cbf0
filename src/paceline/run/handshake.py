"""How workers enter a run: worker 0 decides the memory's layout and initialises it, and the others map it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import reduction

import torch

from paceline.algorithms import registry
from paceline.errors import UsageError
from paceline.memory.arena import Arena, ArenaPlan, plan_arena
from paceline.memory.placement import placement_registry
from paceline.memory.segment import Segment
from paceline.records.checkpoint_contents import Parameters
from paceline.run.loops import Loop
from paceline.specs.bounds import check_vectors, check_workers
from paceline.transport.directory import mark_ended
from paceline.worker.process import Hello, Welcome
from paceline.worker.supervised import NO_WORKER_0, WorkerState


class Handshake:
    """Answers every worker's hello with the run's memory, or with the reason why the worker is refused.

    A worker's hello names its algorithm and the size of its model. Worker 0's hello decides; workers with another algorithm
    or model are refused. After all hellos, worker 0 writes its parameters and dense buffers into the memory, and those of its
    other tensors that differ between workers. The others wait for that.
    """

    def __init__(
        self,
        workers: Sequence[WorkerState],
        loop: Loop,
        saved: Parameters | None,
    ) -> None:
        self.algorithm = loop.algorithm
        self.arena: Arena | None = None
        self.note = ""  # a note about the memory's placement
        self._workers, self._num_workers = workers, len(workers)
        self._config, self._model_plan = loop.config, loop.plan
        self._saved = saved
        self._hello: Hello | None = None  # worker 0's
        self._plan: ArenaPlan | None = None  # without the tensors that are equal on all workers; known after all hellos
        self._is_initialised = False
        self._waiting: dict[int, tuple[WorkerState, Hello]] = {}

    def welcome(self, worker: WorkerState, hello: Hello) -> None:
        """Answers a hello: now, or once the memory is initialised."""
        if self._hello is None and not worker.worker_id:
            if why_not := self._open(hello):
                self.refuse(worker, why_not)
                return
            self._hello = hello
        self._waiting[worker.worker_id] = worker, hello
        self.answer()

    def answer(self) -> None:
        """Answers the waiting workers, if the memory is ready."""
        if self._hello is None:
            if not self._workers[0].running:
                self.refuse_waiting(NO_WORKER_0)
            return
        for worker, hello in [one for one in self._waiting.values() if one[1] != self._hello]:
            del self._waiting[worker.worker_id]
            self.refuse(
                worker,
                f"Worker {worker.worker_id} wants {hello.algorithm} on {hello.num_parameters:,} parameters, worker 0"
                f" {self._hello.algorithm} on {self._hello.num_parameters:,}: all workers must build the same model, in one"
                " memory format.",
            )
        if self._is_initialised:
            for worker, _ in self._waiting.values():
                self.send_plan(worker)
            self._waiting = {}
        elif self._plan is None and all(one.worker_id in self._waiting for one in self._workers if one.running):
            self._agree_on_plan()
            self.send_plan(self._waiting.pop(0)[0], initialise=True)

    def _agree_on_plan(self) -> None:
        """Leaves out of the memory the tensors that are equal on all workers, unless restarted workers will need them."""
        assert self._hello is not None
        assert self.arena is not None
        theirs = zip(*(hello.untrained for _, hello in self._waiting.values()), strict=True)
        alike = {
            one[0][0] for one in theirs if len({digest for _, _, digest in one}) == 1 and not self._config.restarts
        }
        extra = {name: place for name, place in self.arena.plan.extra.items() if name not in alike}
        self._plan = replace(self.arena.plan, extra=extra)

    def count_ready(self, worker: WorkerState) -> None:
        """Notes that a worker has mapped the memory; once worker 0 has, and so has initialised it, the others follow."""
        if not worker.worker_id:
            self._is_initialised = True
            self.answer()

    def lose(self, worker: WorkerState) -> None:
        """Tells workers that are still connecting not to wait for a dead worker."""
        if self.arena is not None and self.arena.plan.stores:
            member = self.arena.plan.seats.of(worker.worker_id).member
            mark_ended(self.arena.shared_store(worker.worker_id), member, worker.incarnation)
        if self.arena is not None and self.arena.plan.mates:
            part = self.arena.plan.seats.of(worker.worker_id).part
            mark_ended(self.arena.mates_store(worker.worker_id), part, worker.incarnation)

    def refuse(self, worker: WorkerState, why: str) -> None:
        with contextlib.suppress(OSError):  # it is gone: its end is the next news
            worker.connection.send(Welcome(None, refusal=why))

    def refuse_waiting(self, why: str) -> None:
        """Refuses workers that wait for memory that will never be initialised."""
        for worker, _ in self._waiting.values():
            self.refuse(worker, why)
        self._waiting = {}

    def _open(self, hello: Hello) -> str:
        """Decides the algorithm and makes the memory; returns why that is impossible, or an empty string."""
        if self.algorithm is None:
            self.algorithm = registry.build(hello.algorithm)
        algorithm, named = self.algorithm, registry.spec(self.algorithm)
        if hello.algorithm != named and algorithm.same_batches:
            return "launch was given a plan: attach plan.part(model), and name no algorithm."
        if hello.algorithm != named and registry.build(hello.algorithm) != algorithm:  # cap=16 equals cap=16.0
            return (
                f"The launcher runs {named} but attach names {hello.algorithm}: name the algorithm in one place only."
            )
        parts = hello.sharding.parts if hello.sharding is not None else 1
        if self._model_plan is not None and not algorithm.same_batches and parts != self._model_plan.workers:
            return "launch was given a plan: attach plan.part(model), of the same plan."
        servers = parts * algorithm.needs.server_programs if self._num_workers > 1 else 0
        if parts > 1 and servers and self._config.restarts:
            return "A worker that has a part of a replica cannot be replaced alone: leave out restarts."
        try:
            algorithm.check(self._num_workers)
            algorithm.check_min_workers(self._config.min_workers, self._num_workers)
            check_workers(self._num_workers, backend=self._config.backend, num_servers=servers)
            vector_bytes = hello.num_elements * hello.dtype.itemsize
            check_vectors(algorithm.needs.num_vectors(self._num_workers), hello.num_parameters, vector_bytes)
        except UsageError as error:
            return str(error)
        plan = plan_arena(
            algorithm.needs,
            num_workers=self._num_workers,
            num_elements=hello.num_elements,
            dtype=hello.dtype,
            memory_order=hello.memory_order,
            extra={**hello.extra, **{name: ((size,), torch.uint8) for name, size, _ in hello.untrained}},
            sharding=hello.sharding,
        )
        segment = Segment.create(plan.size_bytes)
        self.note = placement_registry.build(self._config.placement).place(segment)
        self.arena = Arena(segment, plan, participant_id=self._num_workers + plan.num_server_programs)
        if self._saved is not None:
            self.arena.store("next_batch", self._saved.next_batch)
            self.arena.store("initial_version", self._saved.version)
        if algorithm.needs.mailbox:
            for part in range(plan.seats.num_parts):
                self.arena.shared_store(part).begin()
            for replica in range(len(plan.mates)):
                self.arena.mates_store(replica * plan.seats.num_parts).begin()
        return ""

    def send_plan(self, worker: WorkerState, *, initialise: bool = False) -> None:
        """Sends a worker or a server the run's memory."""
        assert self.arena is not None
        pid = worker.handle.pid if self._config.backend == "processes" else None
        with contextlib.suppress(OSError):  # it is gone: its end is the next news
            worker.connection.send(Welcome(self._plan or self.arena.plan, initialise))
            reduction.send_handle(worker.connection, self.arena.segment.fd, pid)
