"""A server's life inside the process (or thread) that the supervisor starts, and the files that outlive it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch

from paceline.algorithms import registry
from paceline.errors import NotWrittenError, PacelineError, UsageError
from paceline.membership.environment import SupervisedEnvironment, WorkerEnvironment, current_environment
from paceline.membership.peers import Peers
from paceline.memory.arena import Arena, ArenaPlan
from paceline.memory.segment import Segment
from paceline.memory.served import PrivateShard
from paceline.memory.waiting import raise_if_stopped, wait_briefly
from paceline.ports.ports import ServerPorts
from paceline.records import checkpoint_contents as checkpoint
from paceline.system import tensor_files
from paceline.system.clock import RealClock
from paceline.worker.process import NotSaved, Ready, Welcome


@dataclass(frozen=True)
class Restored:
    """A server has taken a dead one's place."""

    shard_id: int
    first_lost: int  # version of the first lost update
    last_lost: int  # version of the last lost update; below `first_lost` if none is lost


@dataclass(frozen=True)
class TakeOver:
    """Tells a second copy that its server is dead, and that it now is that server, in this incarnation."""

    incarnation: int


@dataclass(frozen=True)
class TookOver:
    """The answer to `TakeOver`."""

    shard_id: int


@dataclass(frozen=True)
class ServerMain:
    """The main function of a server, or of its second copy, as data that can be sent to a process."""

    algorithm: str  # its spec
    snapshots: Path | None  # folder for snapshots, from which a successor resumes; None: there will be none

    def __call__(self) -> None:
        environment = current_environment()
        assert isinstance(environment, SupervisedEnvironment)
        connection = environment.supervisor
        algorithm: Any = registry.build(self.algorithm)
        welcome: Welcome = connection.recv()
        assert welcome.plan is not None
        plan = welcome.plan
        segment = Segment.from_fd(reduction.recv_handle(connection), plan.size_bytes)
        arena = Arena(segment, plan, environment.worker_id, environment.incarnation)
        server = (environment.worker_id - plan.num_workers) % plan.num_servers
        shard_id = server % (plan.num_servers // plan.seats.num_parts)  # of its part of the model
        is_copy = environment.worker_id >= plan.num_workers + plan.num_servers
        snapshot_s = getattr(algorithm, "snapshot_s", 0.0)
        storage = ServerStorage(
            server, arena, self.snapshots, snapshot_s, environment.checkpoint, environment.resume, connection.send
        )
        connection.send(Ready())
        while not wait_briefly(arena.address("go"), 0):
            raise_if_stopped(arena.address("abort"))
        lost = storage.begin(restarted=environment.incarnation > 0 and not is_copy, is_copy=is_copy)
        if lost is not None:
            connection.send(Restored(server, *lost))
        meeting = _ServerMailbox(environment, plan)
        with contextlib.closing(meeting), contextlib.closing(storage), torch.no_grad():
            ports = replace(meeting.ports(arena, environment.incarnation), storage=storage)
            if is_copy:
                copy = PrivateShard(len(arena.shared.x), plan.dtype, arena.shared.ranges)
                promoted = partial(
                    _promoted, connection, meeting, Arena(segment, plan, plan.num_workers + shard_id), storage
                )
                ports = replace(ports, shared=copy, promoted=promoted)
            algorithm.serve(shard_id, ports)


def _promoted(connection: Any, meeting: _ServerMailbox, arena: Arena, storage: ServerStorage) -> ServerPorts | None:
    """The dead server's ports, once the supervisor has sent `TakeOver`; `arena` is its view of the run's memory."""
    if not connection.poll():
        return None
    message = connection.recv()
    assert isinstance(message, TakeOver)
    ports = meeting.ports(arena, message.incarnation)
    # The next copy finds it under its new address.
    connection.send(TookOver(arena.participant_id - arena.plan.num_workers))
    return replace(ports, storage=storage)


@dataclass(eq=False)
class _ServerMailbox:
    """The mailbox of a server's process, under one id at a time."""

    environment: WorkerEnvironment
    plan: ArenaPlan
    peers: Peers | None = None

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()

    def ports(self, arena: Arena, incarnation: int) -> ServerPorts:
        """The ports for the member with this arena's id; from now on it is reached under that id only."""
        if self.peers is not None:
            self.peers.close(wait=False)
        ports = arena.server_ports(RealClock(), self.environment.seed)
        self.peers = Peers(
            arena.shared_store(),
            ports.worker_id,
            ports.num_workers,
            ports.counts,
            lambda: arena.load("workers_done") != 0,
            incarnation=incarnation,
            num_servers=self.plan.seats.servers,
        )
        return replace(ports, mailbox=self.peers.mailbox, incarnation=incarnation)


@dataclass(eq=False)
class ServerStorage:
    """A server's snapshots, and its part of the run's checkpoints; implements `Storage`.

    A snapshot is copied at once; a thread writes it under another name and renames it, so that a kill at any instant leaves
    the last snapshot whole. Only one is written at a time. A failure to write is reported to the supervisor, and the write is
    tried again when the next snapshot is due.
    """

    server: int  # this one, among those of all parts of the model
    arena: Arena
    snapshots: Path | None  # folder; None: none are kept
    every_s: float  # at most one snapshot in this time
    folder: Path | None  # the run's `checkpoint` folder, or None
    resume: Path | None  # the checkpoint from which the run resumes, or None
    #: Takes news for the supervisor, from the thread that calls `keep`, `checkpoint` and `close`.
    tell: Callable[[NotSaved], object] = lambda news: None

    def __post_init__(self) -> None:
        self._shared = self.arena.shared
        self._path = self.snapshots / f"shard-{self.server}.pt" if self.snapshots is not None else None
        self._restored: dict[str, Any] | None = None
        self._tried_version = -1
        self._tried_at_s = -math.inf
        self._has_one = False
        self._failed = ""  # why the last one could not be written, until that is reported
        self._writer = ThreadPoolExecutor(1, "snapshots")
        self._written: Future[None] | None = None  # the last snapshot

    def begin(self, *, restarted: bool, is_copy: bool = False) -> tuple[int, int] | None:
        """Finds the state to resume from; a successor also takes over the parameters. A second copy gets all from its server.

        Returns:
            the versions of the first and last update that were lost; None unless a server died.
        """
        if restarted:
            assert self._path is not None
            try:
                self._restored = tensor_files.load(self._path, "its snapshot")
            except UsageError as error:
                raise PacelineError(f"it died, and no process can replace it: {error}.") from error
            self._shared.restore(self._restored["x"])
            return self._restored["version"] + 1, self._shared.version
        if self.resume is not None and not is_copy:
            rule = checkpoint.load_rule_state(self.resume, *self._range)
            self._restored = {"rule": rule} if rule else None  # a lone worker has left no server's state
        return None

    @property
    def _range(self) -> tuple[int, int]:
        """The elements that it has in a checkpoint, where the vectors of the model's parts are in a row."""
        begin, end = self._shared.ranges[self.server % len(self._shared.ranges)]
        return self._shared.begin + begin, self._shared.begin + end

    def restore(self) -> dict[str, Any] | None:
        return self._restored

    def keep(self, state: Callable[[], dict[str, Any]], version: int) -> None:
        """Begins a snapshot if there are updates, the last one is written, and the next is due; the first at once."""
        if self._path is None or not (self._written is None or self._written.done()):
            return
        if self._failed:
            self._tell_failure()
            self._tried_version = -1  # it is tried again, even if nothing has changed since
        now_s = time.monotonic()
        if version == self._tried_version or now_s - self._tried_at_s < self.every_s:
            return
        self._tried_version, self._tried_at_s = version, now_s
        if not self._has_one:  # a snapshot must exist before the first update is applied
            self._write(state())
            return
        self._written = self._writer.submit(self._write_behind, state())

    def checkpoint(self, state: Callable[[], dict[str, Any]], number: int | None) -> None:
        if self.folder is not None:
            now = state()
            kept = {"range": self._range, "x": now["x"], "version": now["version"], "rule": now["rule"]}
            try:
                checkpoint.save_server(self.folder, number, self.server, kept)
            except NotWrittenError as error:
                self.tell(NotSaved(str(error), number))

    def close(self) -> None:
        self._writer.shutdown()
        if self._failed:
            self._tell_failure()

    def _write_behind(self, state: dict[str, Any]) -> None:
        try:
            self._write(state)
        except Exception as error:  # such as a lack of memory: the next write may succeed
            self._failed = f"{type(error).__name__}: {error}"

    def _write(self, state: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            tensor_files.save(self._path, state, sync=False)
            self._has_one = True
        except NotWrittenError as error:
            self._failed = str(error)

    def _tell_failure(self) -> None:
        why, self._failed = self._failed, ""
        with contextlib.suppress(OSError):  # the supervisor is gone, and this process will end, too
            self.tell(NotSaved(why, is_snapshot=True))
