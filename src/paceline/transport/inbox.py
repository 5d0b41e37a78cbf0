"""The receiving end of a mailbox: one ROUTER socket that every peer connects to, and what happens to its connections."""

from __future__ import annotations

import ipaddress
import os
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import UsageError
from paceline.transport.authentication import Authenticator
from paceline.transport.keys import Keys
from paceline.transport.local_socket import LocalSocket
from paceline.transport.wire import Sort, sort_of

HANDSHAKE_DEADLINE_S = 5.0  # after this, an unfinished connection is closed, and the peer is dialled again
_LONGEST_S = 1e6  # ZeroMQ counts milliseconds in 32 bits
_MAX_MESSAGE_BYTES = 1 << 32

_MONITOR = "inproc://inbox"  # of a context, in which there is one inbox
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Frames(NamedTuple):
    """One message as it came."""

    identity: bytes  # of the connection: a name that its other end chose for it
    head: bytes  # the first frame
    memory: memoryview | None  # the second frame, if there is one
    connection: int  # which connection; set for hellos only
    well_formed: bool = True


class Lost(NamedTuple):
    """A connection has ended, with or without a bye."""

    connection: int


def limit(socket: zmq.Socket, peer_deadline_s: float) -> None:
    """Sets what both ends of every connection need: heartbeats, and a deadline for the handshake.

    ZeroMQ's own thread sends and answers the heartbeats, so that a worker in a long computation does not look dead. A
    silent peer is lost after one timeout, or up to one interval (a quarter of it) later.

    Queues have no limit of ZeroMQ's, as senders limit themselves (`WINDOW`). Where one is full, ZeroMQ reads no heartbeats,
    and if the connection ends then, the next heartbeat aborts the process (libzmq 4.3.5, issue 4364).
    """
    interval_ms = max(1, round(min(peer_deadline_s, _LONGEST_S) * 1e3 / 4))
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * interval_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(min(peer_deadline_s, HANDSHAKE_DEADLINE_S) * 1e3))


class Inbox:
    """Reads messages and lost connections, in an order in which a connection's loss comes after its last message.

    One thread at a time may `read`; any may `wake` it.

    Args:
        host: address to listen on, at a port that the system chooses; None: only this user's processes on this machine get in.
        keys: that a peer must have to get in; needed with `host`.
        peer_deadline_s: silence after which a connection counts as lost.
    """

    def __init__(self, context: zmq.Context, host: str | None, keys: Keys | None, peer_deadline_s: float) -> None:
        if host is not None:
            _check_host(host, keys)
        self.refused = 0  # connections that did not get past the handshake: other protocols, other keys
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._router = context.socket(zmq.ROUTER)
        limit(self._router, peer_deadline_s)
        self._authenticator = Authenticator(context, self._router, keys) if keys is not None else None
        # Unlimited: ZeroMQ's thread blocks on a full queue, and each connection attempt by a stranger is an event.
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._router.monitor(_MONITOR, zmq.EVENT_DISCONNECTED | _REFUSALS)
        self._monitor.connect(_MONITOR)
        self._poller = zmq.Poller()
        for socket in (self._router, self._monitor, self._wake):
            self._poller.register(socket, zmq.POLLIN)
        if self._authenticator is not None:
            self._poller.register(self._authenticator.requests, zmq.POLLIN)
        self._local_socket: LocalSocket | None = None
        try:
            if host is None:
                self._local_socket = LocalSocket(self._router)
                self.endpoint: str = self._local_socket.endpoint
            else:
                self._router.ipv6 = ":" in host
                self._router.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
                self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            where, remedy = (host, "Name an address of this machine") if host else ("a socket", "See TMPDIR")
            raise UsageError(f"Cannot listen on {where}: {error.strerror}. {remedy}.") from None

    def read(self, timeout_s: float | None) -> list[Frames | Lost]:
        """Waits for a message or event; empty after `timeout_s` (None: no limit), or when woken."""
        ready = dict(zmq.zmq_poll(self._poller.sockets, -1 if timeout_s is None else int(timeout_s * 1e3)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._authenticator is not None and self._authenticator.requests in ready:
            self._authenticator.answer()
        found: list[Frames] = []
        if self._router in ready:
            found.append(self._read_one())
        if self._monitor in ready or (found and _is_hello(found[0])):
            lost = self._lost_connections()
            if lost:
                found += self._read_all()
                fresh = {one.identity for one in found if _is_hello(one)}  # these may reuse a lost connection's number
                before = [one for one in found if one.identity not in fresh]
                return [*before, *lost, *(one for one in found if one.identity in fresh)]
        return [*found]

    def wake(self) -> None:
        """Ends a `read` that waits, or the next one."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._router.disable_monitor()
        for socket in (self._router, self._monitor):
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.close()
        if self._local_socket is not None:
            self._local_socket.close()
        os.close(self._wake)

    def _read_one(self) -> Frames:
        identity = self._router.recv()
        first = self._router.recv(copy=False)
        memory, well_formed, more = None, True, first.more
        if more:
            frame = self._router.recv(copy=False)
            memory, more = frame.buffer, frame.more
        while more:
            more, well_formed = self._router.recv(copy=False).more, False
        head = first.bytes
        connection = -1
        if sort_of(head) == Sort.HELLO:
            try:
                connection = int(first.get(zmq.SRCFD))
            except zmq.ZMQError:  # only a peer that speaks ZMTP 1.0, which is no worker, has no descriptor
                well_formed = False
        return Frames(identity, head, memory, connection, well_formed)

    def _read_all(self) -> list[Frames]:
        found = []
        while self._router.get(zmq.EVENTS) & zmq.POLLIN:
            found.append(self._read_one())
        return found

    def _lost_connections(self) -> list[Lost]:
        lost = []
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                lost.append(Lost(int(event["value"])))
            else:
                self.refused += 1
        return lost


def _is_hello(one: Frames) -> bool:
    return sort_of(one.head) == Sort.HELLO


def _check_host(host: str, keys: Keys | None) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"Cannot listen on {host!r}: give an IP address of this machine.") from None
    if address.is_unspecified:
        raise UsageError(f"Cannot listen on {host}: give the one address of this machine at which peers can reach it.")
    if keys is None:
        raise UsageError(f"Listening on {host}, which others can reach, needs a key file (`keys`).")
