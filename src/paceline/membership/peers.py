"""A worker's connection to its peers in a real run: its mailbox and its background program, both ending with the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist

from paceline.errors import RunStopped
from paceline.ports.ports import Counts, Event, Filter, Received
from paceline.transport.concurrency import ThreadConcurrency
from paceline.transport.keys import Keys
from paceline.transport.mailbox import ZmqMailbox

_dist: Any = dist  # its type stubs do not name the stores

_STORE_DEADLINE_S = 60.0
_SEND_DEADLINE_S = 10.0
_LATE_CONNECT_S = 3.0
_SWITCH_INTERVAL_S = 100e-6
_LOOK_EVERY_S = 0.1  # how often a wait checks whether the run is being stopped
_LOOK_ROUND_S = 0.2  # how long a server dials the workers that are there
_GRACE_S = 5.0  # how long a server keeps answering requests after a run is stopped


def mailbox_part(store: Any, part: int = 0) -> Any:
    """The prefix of a run's store under which the mailboxes of the workers with a part of the model find each other."""
    return _dist.PrefixStore(f"mailbox {part}", store)


class Peers:
    """The mailbox and background programs of one worker.

    Raises:
        WorkerLostError: a peer did not connect within a minute.
        RunStopped: the run was stopped before all had connected.
    """

    def __init__(
        self,
        store: Any,  # where the mailboxes of this run find each other; it holds nothing else
        worker_id: int,
        num_workers: int,
        counts: Counts,  # messages and bytes are added there
        stopped: Callable[[], bool],  # whether the run is being stopped
        *,
        incarnation: int = 0,  # how many processes this worker has had before
        # Members after the workers. With servers, a worker talks only to them and does not wait for others at the
        # start; servers still answer while the run is being stopped.
        num_servers: int = 0,
        host: str | None = None,  # address of this machine by which the others reach it; None: all are on this machine
        key: Path | Keys | None = None,  # the run's key file, or its contents; needed with `host`
        connect: bool = True,  # waits for all others at once; otherwise the caller does
        patience_s: float = 5.0,  # how long a peer may be silent before it counts as lost
    ) -> None:
        self._zmq = ZmqMailbox(
            store,
            worker_id,
            num_workers + num_servers,
            incarnation=incarnation,
            host=host,
            keys=key,
            counts=counts,
            peer_deadline_s=patience_s,
            send_deadline_s=max(_SEND_DEADLINE_S, patience_s),
        )
        self.connect, self.ends, self.incarnation = self._zmq.connect, self._zmq.ends, self._zmq.incarnation
        try:
            if worker_id >= num_workers:
                self.connect(_LOOK_ROUND_S, needs_all=False)  # a successor must be the one who dials
            elif num_servers:
                self.connect(0.0, needs_all=False)
            elif connect and incarnation:
                self._connect_late(stopped)
            elif connect:
                self.connect(_STORE_DEADLINE_S, stopped=stopped)
        except BaseException:
            self._zmq.close()
            raise
        # The averaging thread needs the interpreter for microseconds at a time. By default the training thread would yield
        # it only after 5 ms, at every message.
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if worker_id >= num_workers:
            self.mailbox: Any = ServerMailbox(self._zmq, stopped)
        else:
            self.mailbox = RunMailbox(
                self._zmq, stopped, counts, grace_s=_GRACE_S if num_servers else 0.0, has_servers=num_servers > 0
            )
        self.concurrency = ThreadConcurrency()

    def _connect_late(self, stopped: Callable[[], bool]) -> None:
        """Connects a dead worker's successor to the reachable peers; others may have died or hung."""
        until_s = time.monotonic() + _STORE_DEADLINE_S
        self.connect(_LATE_CONNECT_S, needs_all=False, stopped=stopped)
        while not self._zmq.peers() and self._zmq.awaited() and time.monotonic() < until_s:
            self.connect(_LATE_CONNECT_S, needs_all=False, stopped=stopped)

    def close(self, *, wait: bool = True) -> None:
        """Says goodbye and frees the sockets; without `wait`, a thread does so, since messages to a dead peer take long."""
        sys.setswitchinterval(self._switch_interval_s)
        if wait:
            self._zmq.close()
        else:
            threading.Thread(target=self._zmq.close, name="mailbox-close", daemon=True).start()


@dataclass(eq=False)
class RunMailbox:
    """A mailbox in which a wait for one peer ends with the run; a message to oneself ends a wait for any sender.

    Attributes:
        waited_s: seconds spent waiting for one peer, or for any server; the caller reads it and sets it back to 0.
    """

    inner: ZmqMailbox
    stopped: Callable[[], bool]
    counts: Counts
    _: KW_ONLY
    grace_s: float = 0.0
    has_servers: bool = False  # which are then the only peers

    def __post_init__(self) -> None:
        self.send = self.inner.send
        self.peers = self.inner.peers
        self.waited_s = 0.0

    def receive(self, timeout_s: float | None = None, **wanted: Unpack[Filter]) -> Event | None:
        """The next matching event, as in `Mailbox.receive`.

        Raises:
            RunStopped: the run is being stopped while this waits for `sender`.
        """
        is_of_one = wanted.get("sender") is not None
        if not (is_of_one or self.has_servers):
            return self.inner.receive(timeout_s, **wanted)
        begun_s, arrival = time.monotonic(), None
        try:
            arrival = (self._receive_of_one if is_of_one else self.inner.receive)(timeout_s, **wanted)
            return arrival
        finally:
            waited_s = time.monotonic() - begun_s
            self.waited_s += waited_s
            if isinstance(arrival, Received):
                self.counts.note_partner(arrival.sender, waited_s)

    def _receive_of_one(self, timeout_s: float | None, **wanted: Unpack[Filter]) -> Event | None:
        until_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        stopped_s = float("inf")
        while True:
            left_s = until_s - time.monotonic()
            arrival = self.inner.receive(max(0.0, min(_LOOK_EVERY_S, left_s)), **wanted)
            if isinstance(arrival, Received) or (arrival is not None and not self.stopped()):
                return arrival
            if self.stopped():
                stopped_s = min(stopped_s, time.monotonic())
                if time.monotonic() - stopped_s >= self.grace_s:
                    raise RunStopped
            if left_s <= _LOOK_EVERY_S:
                return None


class ServerMailbox:
    """A server's mailbox: its waits end once all workers have ended."""

    def __init__(self, inner: ZmqMailbox, stopped: Callable[[], bool]) -> None:
        self._inner = inner
        self._stopped = stopped
        self.send = inner.send
        self.peers = inner.peers

    def receive(self, timeout_s: float | None = None, **wanted: Unpack[Filter]) -> Event | None:
        """As in `Mailbox`; raises `RunStopped` once all workers have ended."""
        until_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while True:
            left_s = until_s - time.monotonic()
            arrival = self._inner.receive(max(0.0, min(_LOOK_EVERY_S, left_s)), **wanted)
            if arrival is not None:
                return arrival
            if self._stopped():
                raise RunStopped
            if left_s <= _LOOK_EVERY_S:
                return None
