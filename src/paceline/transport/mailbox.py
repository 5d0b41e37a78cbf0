"""Messages between the processes of a run over ZeroMQ."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import zmq

from paceline.errors import PacelineError, PeerLostError, RunStopped, WorkerLostError, first_line
from paceline.ports.matching import PendingEvents
from paceline.ports.ports import Counts, Event, Filter, Message, PeerBack, PeerLeft, Received
from paceline.transport.connections import WINDOW, Dialler, Peer, hello_vector, read_hello
from paceline.transport.contexts import end_context, uninterrupted
from paceline.transport.directory import Directory
from paceline.transport.ends import EndDetector
from paceline.transport.inbox import Frames, Inbox, Lost
from paceline.transport.keys import Keys, load_keys
from paceline.transport.wire import MalformedFrameError, Parcel, Sort, pack, unpack

_TICK_S = 0.25  # how often the mailbox maintains its connections while no thread calls it
_MOST_PENDING = 64  # messages read before a `receive` asks for them; further ones wait at their senders
_LOOK_UP_S = 0.05
_LINGER_S = 10.0
_PAUSE_S = 0.002


class ZmqMailbox(contextlib.AbstractContextManager["ZmqMailbox"]):
    """The `Mailbox` of one worker; safe to use from several threads.

    Workers find each other once, through a torch.distributed store, which may be gone later. The calling thread works on the
    sockets, so that no message changes threads; a background thread maintains the connections every 0.25 s.

    Costs: one copy of a vector at `send`, none of long ones at `receive`. A message must not take the network longer than
    `peer_deadline_s`, or the peer seems silent.

    Args:
        store: a `torch.distributed.Store` of this run alone (a `PrefixStore`, if others use it too).
        incarnation: how many times this worker has been started before.
        host: address of this machine, by which others reach it; None: all workers are processes of one user on one
            machine, whose kernel keeps out all other processes.
        keys: file made by `create_keys`, or its contents, the same for all workers;
            encrypts and authenticates. Needed with `host`.
        peer_deadline_s: a peer that is silent for this long has left.
        send_deadline_s: how long `send` waits for a peer that takes no more messages. `close` waits as long, but 10 s at most,
            for messages under way.

    Raises:
        UsageError: `host` or `keys` is wrong.
    """

    def __init__(
        self,
        store: Any,
        worker_id: int,
        num_workers: int,
        *,
        incarnation: int = 0,
        host: str | None = None,
        keys: Path | Keys | None = None,
        counts: Counts | None = None,
        peer_deadline_s: float = 5.0,
        send_deadline_s: float = 10.0,
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._counts = counts if counts is not None else Counts()
        self._send_deadline_s = send_deadline_s
        self._directory = Directory(store, worker_id, incarnation, is_local=host is None)
        self._silence = f"its connection broke, or it gave no sign of life for {peer_deadline_s:g} s"
        self.dropped = 0  # discarded messages that no worker of this run can have sent
        own_keys = None if keys is None else load_keys(keys)
        self._context = zmq.Context()
        try:
            with uninterrupted():
                self._inbox = Inbox(self._context, host, own_keys, peer_deadline_s)
        except BaseException:
            with uninterrupted():
                self._context.destroy(linger=0)
            raise
        self._dialler = Dialler(self._context, worker_id, incarnation, own_keys, peer_deadline_s)
        self._peers = {other: Peer(other) for other in range(num_workers) if other != worker_id}
        self.ends = EndDetector(self._peers, peer_deadline_s)
        self._pending = PendingEvents()
        self._changed = threading.Condition(threading.Lock())  # guards everything but the inbox
        self._reading = False  # a thread is in the inbox, without the lock
        self._started = False
        self._closed = threading.Event()
        self._failure: BaseException | None = None  # of the thread that keeps the connections
        try:
            self._run = store.compare_set("run", "", secrets.token_hex(8)).decode()
            self._dialler.hello = hello_vector(self._run, self._inbox.endpoint)
            self._directory.enter(self._inbox.endpoint)
        except BaseException:
            self._inbox.close()
            with uninterrupted():
                self._context.term()
            raise
        self._keeper = threading.Thread(target=self._keep, name="mailbox", daemon=True)
        self._keeper.start()

    @property
    def refused(self) -> int:
        """Connections that were turned away: another protocol, or another key."""
        return self._inbox.refused

    def connect(self, timeout_s: float, *, needs_all: bool = True, stopped: Callable[[], bool] = lambda: False) -> None:
        """Waits until all peers that have not ended can be reached; `PeerBack` reports those that come later.

        Raises:
            WorkerLostError: `needs_all`, and peers are missing after `timeout_s`; the message names them.
            RunStopped: the run was `stopped` meanwhile, so missing peers will not come.
        """
        until_s = time.monotonic() + timeout_s
        look_up_s = 0.0
        while (missing := self.awaited()) and time.monotonic() < until_s:
            if stopped():
                raise RunStopped("the run was stopped while this worker waited for the others")
            if time.monotonic() >= look_up_s:
                for worker_id in missing:
                    self._look_up(worker_id)
                look_up_s = time.monotonic() + _LOOK_UP_S
            with self._changed:
                self._check_open()
                self._read_or_wait(min(_LOOK_UP_S, max(0.0, until_s - time.monotonic())))
        with self._changed:
            self._started = True
        if missing and needs_all:
            dialled = [worker_id for worker_id in missing if self._peers[worker_id].endpoint]
            remedy = " Do all workers have the same key file?" if self.refused else ""
            why = self._directory.why_missing(missing, dialled)
            raise WorkerLostError(f"After {timeout_s:g} s {why}.{remedy}")

    def send(self, to: int, message: Message) -> None:
        if to == self._worker_id:
            self._send_to_itself(message)
            return
        head, memory = pack(Sort.MESSAGE, message, self._worker_id, self._incarnation)
        num_bytes = len(head) + (0 if memory is None else len(memory))
        own = None if memory is None else zmq.Frame(memory, copy=True)
        peer = self._peers[to]
        until_s = math.inf
        if not peer.endpoint:
            self._look_up(to)
        with self._changed:
            while True:
                self._check_open()
                if not peer.here and (peer.met or peer.ended):
                    raise PeerLostError(to, peer.why_left)
                if peer.takes_more and self._dialler.put(peer, head, own):
                    peer.sent += 1
                    self._counts.messages += 1
                    self._counts.sent_bytes += num_bytes
                    return
                now_s = time.monotonic()
                until_s = min(until_s, now_s + self._send_deadline_s)
                if now_s >= until_s:
                    what = "has taken no message" if peer.here else "has not joined"
                    raise PeerLostError(to, f"it {what} for {self._send_deadline_s:g} s")
                self._read_or_wait(_PAUSE_S)

    def receive(self, timeout_s: float | None = None, **wanted: Unpack[Filter]) -> Event | None:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        left_s, last = timeout_s, False
        with self._changed:
            while True:
                self._check_open()
                event = self._pending.take(**wanted)
                if event is not None or last:
                    return event
                if until_s is not None:
                    left_s = until_s - time.monotonic()
                    last = left_s <= 0
                self._read_or_wait(left_s if not last else 0.0)

    def peers(self) -> frozenset[int]:
        with self._changed:
            return frozenset(peer.worker_id for peer in self._peers.values() if peer.here)

    def incarnation(self, worker_id: int) -> int:
        """Of this worker, or the highest known of a peer."""
        return self._incarnation if worker_id == self._worker_id else self._peers[worker_id].incarnation

    def close(self) -> None:
        """Says bye, waits for unsent messages (`send_deadline_s`, but 10 s at most), and frees everything."""
        linger_s = min(self._send_deadline_s, _LINGER_S)
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            with contextlib.suppress(RuntimeError):  # the store is gone, so no further peer can find this worker
                self._directory.leave()
            self._inbox.wake()
            self._changed.notify_all()
            while self._reading:
                self._changed.wait()
            for peer in self._peers.values():
                if peer.here:
                    self._dialler.say(peer, Sort.BYE, Message("bye"))
                if peer.outgoing is not None:
                    peer.outgoing.close(linger=round(linger_s * 1e3) if peer.here else 0)
        self._keeper.join()
        self._inbox.close()
        end_context(self._context, linger_s)
        self._directory.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading: one thread at a time, without the lock while it waits

    def _read_or_wait(self, timeout_s: float | None) -> None:
        """Reads messages, or waits while another thread does; the lock is held before and after."""
        if self._dialler.catch_up(self._peers):
            timeout_s = _PAUSE_S if timeout_s is None else min(timeout_s, _PAUSE_S)
        if self._reading:
            self._changed.wait(timeout_s)
            return
        self._reading = True
        found: list[Frames | Lost] = []
        self._changed.release()
        try:
            found = self._inbox.read(timeout_s)
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        for one in found:
            self._handle(one)

    def _handle(self, one: Frames | Lost) -> None:
        if isinstance(one, Lost):
            self._lost(one.connection)
            return
        if (parcel := self._parcel(one)) is None:
            self.dropped += 1
            return
        sort, received = parcel
        peer = self._peers[received.sender]
        match sort:
            case Sort.MESSAGE:
                self._pending.add(received)
                peer.received += 1
                if peer.received % (WINDOW // 2) == 0:
                    self._dialler.say(peer, Sort.TAKEN, Message("taken", peer.received))
            case Sort.TAKEN:
                peer.taken = max(peer.taken, min(received.message.number, peer.sent))
            case Sort.WELCOME:
                self._welcomed(peer, received.message.number)
            case Sort.BYE:
                peer.died = peer.incarnation
                self._leave(peer, "it has ended")
            case Sort.HELLO:
                self._hello(peer, one, received)

    def _parcel(self, frames: Frames) -> Parcel | None:
        """The parsed message; None if no peer of this run can have sent it on this connection."""
        if not frames.well_formed:
            return None
        try:
            parcel = unpack(frames.head, frames.memory)
        except MalformedFrameError:
            return None
        received = parcel.received
        peer = self._peers.get(received.sender)
        if peer is None:
            return None
        if parcel.sort is Sort.HELLO:
            told = read_hello(received.message.x)
            return parcel if told is not None and told[0] == self._run and self._directory.may_dial(told[1]) else None
        expected = peer.identity == frames.identity and peer.incarnation == received.incarnation
        return parcel if expected and (peer.here or parcel.sort is not Sort.MESSAGE) else None

    def _hello(self, peer: Peer, frames: Frames, received: Received) -> None:
        if received.incarnation < peer.incarnation or (received.incarnation == peer.incarnation and peer.ended):
            return
        told = read_hello(received.message.x)
        assert told is not None
        if received.incarnation > peer.incarnation:
            self._leave(peer, "a new process has taken its place")
            self.ends.succeed(peer, received.incarnation, told[1])
        elif peer.here:
            self._leave(peer, "its connection broke")
        was_here = peer.here
        peer.heard(frames.identity, frames.connection)
        if peer.outgoing is None:
            self._dialler.dial(peer)
        self._dialler.say(peer, Sort.WELCOME, Message("welcome", received.message.number))
        self._announce(peer, was_here)

    def _welcomed(self, peer: Peer, dial_number: int) -> None:
        was_here = peer.here
        peer.welcomed = peer.welcomed or dial_number == peer.dial_number
        self._announce(peer, was_here)

    def _announce(self, peer: Peer, was_here: bool) -> None:
        if peer.here and not was_here:
            if peer.met or self._started:
                self._pending.add(PeerBack(peer.worker_id, peer.incarnation))
            peer.met = True

    def _leave(self, peer: Peer, why: str) -> None:
        if peer.here:
            self._pending.add(PeerLeft(peer.worker_id, peer.incarnation, "ended" if peer.ended else why))
            peer.why_left = why
            self.ends.lose(peer)
        peer.forget_incoming()
        peer.close_outgoing()
        peer.redial_at_s = math.inf if peer.ended else 0.0

    def _lost(self, connection: int) -> None:
        for peer in self._peers.values():
            if peer.connection == connection and peer.here:
                self._leave(peer, self._silence)
            elif peer.connection == connection:
                peer.forget_incoming()

    def awaited(self) -> set[int]:
        """Peers that have not arrived and have not ended."""
        with self._changed:
            return {peer.worker_id for peer in self._peers.values() if not peer.here and not peer.ended}

    def _look_up(self, worker_id: int) -> None:
        """Dials a peer that the store knows and this worker does not."""
        peer = self._peers[worker_id]
        try:
            entry = self._directory.look_up(worker_id, endpoint=not peer.endpoint)
        except RuntimeError:  # the store is gone; the peer may still come by itself
            return
        with self._changed:
            self._check_open()
            if entry.ended >= max(entry.incarnation, peer.incarnation, 0) and not peer.here:
                peer.died, peer.why_left = entry.ended, "it has ended"
            elif entry.endpoint and not peer.endpoint and entry.incarnation >= peer.incarnation:
                peer.incarnation, peer.endpoint = entry.incarnation, entry.endpoint
                self._dialler.dial(peer)

    def _keep(self) -> None:
        """Answers hellos, notices losses and redials lost peers while no thread sends or receives."""
        try:
            while not self._closed.wait(_TICK_S):
                with self._changed:
                    for _ in range(_MOST_PENDING):
                        if self._reading or self._closed.is_set() or len(self._pending) >= _MOST_PENDING:
                            break
                        self._read_or_wait(0.0)
                    if not self._closed.is_set():
                        self._redial()
                    has_read_all = len(self._pending) < _MOST_PENDING
                self.ends.look(has_read_all=has_read_all)
        except BaseException as error:  # `_check_open` raises it in the threads that use the mailbox
            with self._changed:
                self._failure = error
                self._inbox.wake()
                self._changed.notify_all()

    def _redial(self) -> None:
        self._dialler.catch_up(self._peers)
        now_s = time.monotonic()
        for peer in self._peers.values():
            if peer.endpoint and not peer.here and not peer.ended and now_s >= peer.redial_at_s:
                self._dialler.dial(peer)

    def _send_to_itself(self, message: Message) -> None:
        x = None if message.x is None else message.x.detach().clone()
        with self._changed:
            self._check_open()
            self._pending.add(Received(self._worker_id, self._incarnation, message._replace(x=x)))
            self._changed.notify_all()
            if self._reading:
                self._inbox.wake()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise PacelineError("This mailbox is closed.")
        if self._failure is not None:
            what = f"{type(self._failure).__name__}: {first_line(self._failure)}"
            raise PacelineError(
                f"This worker can exchange no more messages, because a thread of its mailbox failed ({what})."
            ) from self._failure
