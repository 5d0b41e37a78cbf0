"""How workers come into a run: the first one decides the memory and initialises it, the others map what it left."""

from __future__ import annotations

import contextlib
from multiprocessing import reduction

from paceline.algorithms import Algorithm, registry
from paceline.errors import UsageError
from paceline.memory.arena import Arena, plan_arena
from paceline.memory.placement import placement_registry
from paceline.memory.segment import Segment
from paceline.specs.bounds import check_vectors, check_workers
from paceline.transport.directory import mark_ended
from paceline.worker.process import Hello, Welcome
from paceline.worker.supervised import WorkerState

__all__ = ["Handshake"]

_DONE = -1


class Handshake:
    """Answers every worker's hello with the run's memory, or with the reason why it may not take part.

    A worker's hello says which algorithm and how large a model it brings. The first one is taken at its word; whoever says
    something else later is refused. Until the first worker has written its parameters into the memory, the others wait.

    Args:
        num_workers: how many take part.
        algorithm: how they agree; None where the workers' code names it.
        placement: where the memory goes.
        own_processes: whether workers are processes, so that the memory's handle must be sent to their id.
        first_batch: the batch that training starts with: not 0 in a resumed run.
        first_version: the version that the parameters start with.
    """

    def __init__(
        self,
        num_workers: int,
        algorithm: Algorithm | None,
        placement: str,
        *,
        own_processes: bool,
        first_batch: int,
        first_version: int,
    ) -> None:
        self.algorithm = algorithm
        self.arena: Arena | None = None
        self.note = ""  # what placing the memory had to say
        self._num_workers = num_workers
        self._placement = placement
        self._own_processes = own_processes
        self._backend = "processes" if own_processes else "threads"
        self._first_batch = first_batch
        self._first_version = first_version
        self._hello: Hello | None = None
        self._initialising: int | None = None
        self._waiting: list[WorkerState] = []

    def welcome(self, worker: WorkerState, hello: Hello) -> None:
        """Answers a hello: now, or once the memory is initialised."""
        if self._hello is None:
            self._hello = hello
            why_not = self._open(hello)
        elif hello != self._hello:
            why_not = (
                f"Worker {worker.worker_id} wants {hello.algorithm} on {hello.num_parameters:,} parameters, the others"
                f" {self._hello.algorithm} on {self._hello.num_parameters:,}: all workers must build the same model."
            )
        else:
            why_not = ""
        if why_not:
            self.refuse(worker, why_not)
        elif self._initialising is None:
            self._initialising = worker.worker_id
            self._send_plan(worker, initialise=True)
        elif self._initialising == _DONE:
            self._send_plan(worker, initialise=False)
        else:
            self._waiting.append(worker)

    def admit_server(self, server: WorkerState) -> None:
        """Sends a server the run's memory; it waits there until training begins."""
        self._send_plan(server, initialise=False)

    def count_ready(self, worker: WorkerState) -> None:
        """A worker has mapped the memory; if it was to initialise it, those who wait may come in."""
        if self._initialising == worker.worker_id:
            self._initialising = _DONE
            for other in self._waiting:
                self._send_plan(other, initialise=False)
            self._waiting = []

    def lose(self, worker: WorkerState) -> None:
        """Lets workers that are just meeting the others know that they need not wait for a dead one."""
        if self.arena is not None and self.arena.plan.store is not None:
            mark_ended(self.arena.shared_store(), worker.worker_id, worker.incarnation)

    def refuse(self, worker: WorkerState, why: str) -> None:
        """Sends a worker away with a sentence that it raises."""
        with contextlib.suppress(OSError):  # it is gone: its end is the next news
            worker.connection.send(Welcome(None, refusal=why))

    def refuse_waiting(self, why: str) -> None:
        """Sends those away who wait for memory that nobody will initialise any more."""
        for worker in self._waiting:
            self.refuse(worker, why)
        self._waiting = []

    def _open(self, hello: Hello) -> str:
        """Decides the algorithm and makes the memory; returns why that cannot be."""
        algorithm = registry.build(hello.algorithm)
        if self.algorithm is not None and algorithm != self.algorithm:
            return (
                f"The launcher runs {registry.spec(self.algorithm)} but attach names {hello.algorithm}: name the algorithm in"
                " one place only."
            )
        self.algorithm = algorithm
        servers = algorithm.needs.server_programs if self._num_workers > 1 else 0
        try:
            algorithm.check(self._num_workers)
            check_workers(self._num_workers, backend=self._backend, num_servers=servers)
            vector_bytes = hello.num_elements * hello.dtype.itemsize
            check_vectors(algorithm.needs.num_vectors(self._num_workers), hello.num_parameters, vector_bytes)
        except UsageError as error:
            return str(error)
        plan = plan_arena(
            algorithm.needs,
            num_workers=self._num_workers,
            num_elements=hello.num_elements,
            dtype=hello.dtype,
            extra=hello.extra,
            sharding=hello.sharding,
        )
        segment = Segment.create(plan.size_bytes)
        self.note = placement_registry.build(self._placement).place(segment)
        self.arena = Arena(segment, plan, participant_id=self._num_workers + plan.num_server_programs)
        self.arena.store("next_batch", self._first_batch)
        self.arena.store("initial_version", self._first_version)
        if algorithm.needs.mailbox:
            self.arena.shared_store().begin()
        return ""

    def _send_plan(self, worker: WorkerState, *, initialise: bool) -> None:
        assert self.arena is not None
        pid = worker.handle.pid if self._own_processes else None
        with contextlib.suppress(OSError):  # it is gone: its end is the next news
            worker.connection.send(Welcome(self.arena.plan, initialise))
            reduction.send_handle(worker.connection, self.arena.segment.fd, pid)
