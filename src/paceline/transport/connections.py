"""A mailbox's peers: their addresses, their connections, and which of them can be reached.

Two workers know each other once both have dialled. Each says hello on the connection that it opened, and answers the other's
hello with a welcome on it; a peer is `here` when both its hello and its welcome have come, so both directions work. The end of
either connection ends both: a worker that loses one closes its own, which tells the other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import zmq

from paceline.ports.ports import Message
from paceline.transport.authentication import authenticate
from paceline.transport.contexts import uninterrupted
from paceline.transport.inbox import HANDSHAKE_DEADLINE_S, limit
from paceline.transport.keys import Keys
from paceline.transport.local_socket import is_endpoint
from paceline.transport.wire import Sort, pack

WINDOW = 32  # unacknowledged messages to one peer
_MOST_BYTES = 1024  # of a hello's vector
_HANDSHAKE_S = 1.0  # nearly every connection that succeeds does so within this time


@dataclass
class Peer:
    """One other worker."""

    worker_id: int
    incarnation: int = -1  # the highest known
    endpoint: str = ""
    outgoing: zmq.Socket | None = None  # the connection that this worker opened
    dial_number: int = 0
    dialled_at_s: float = -math.inf
    redial_at_s: float = math.inf
    identity: bytes = b""  # of the connection that the peer opened, once its hello came
    connection: int = -1
    welcomed: bool = False
    met: bool = False  # has been here
    died: int = -1  # the newest incarnation that has certainly ended
    heard_s: float = -math.inf  # when it was last known to be reachable, if it is not here now
    why_left: str = ""
    sent: int = 0  # messages on the connection that this worker opened
    taken: int = 0  # how many of those the peer has acknowledged
    received: int = 0  # messages on the connection that the peer opened
    unsaid: deque[tuple[bytes, memoryview | None]] = field(default_factory=deque)  # until the connection stands

    @property
    def here(self) -> bool:
        return self.welcomed and bool(self.identity)

    @property
    def ended(self) -> bool:
        """Whether its process has ended, and no other one has taken its place."""
        return self.died >= max(self.incarnation, 0)

    @property
    def takes_more(self) -> bool:
        return self.here and self.sent - self.taken < WINDOW

    def heard(self, identity: bytes, connection: int) -> None:
        self.identity, self.connection, self.received = identity, connection, 0

    def forget_incoming(self) -> None:
        self.identity, self.connection = b"", -1

    def close_outgoing(self) -> None:
        """Closes the connection that this worker opened; drops its unsent messages."""
        if self.outgoing is not None:
            self.outgoing.close(linger=0)
        self.outgoing, self.welcomed = None, False
        self.unsaid.clear()


def hello_vector(run: str, endpoint: str) -> torch.Tensor:
    """The vector of a hello."""
    return torch.frombuffer(bytearray(f"{run} {endpoint}".encode("ascii")), dtype=torch.uint8)


def read_hello(x: torch.Tensor | None) -> tuple[str, str] | None:
    """Run and endpoint from a hello; None if it is malformed."""
    if x is None or x.dtype != torch.uint8 or x.numel() > _MOST_BYTES:
        return None
    words = bytes(x.tolist()).split(b" ")
    if len(words) != 2 or not all(word.isascii() for word in words) or not is_endpoint(words[1].decode("ascii")):
        return None
    return words[0].decode("ascii"), words[1].decode("ascii")


class Dialler:
    """Opens connections, and sends on them without ever waiting."""

    def __init__(
        self, context: zmq.Context, worker_id: int, incarnation: int, keys: Keys | None, peer_deadline_s: float
    ) -> None:
        self._context = context
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._keys = keys
        self._peer_deadline_s = peer_deadline_s
        self.hello: torch.Tensor | None = None
        self._waiting: set[int] = set()  # peers with unsent messages

    def dial(self, peer: Peer) -> None:
        """Opens a new connection in place of the last, and says hello once it is established.

        ZeroMQ must not reconnect by itself: messages under way when a connection breaks would be lost silently. Nor may it
        queue messages for a connection that does not exist (`IMMEDIATE`): closing a socket whose peer has just gone would
        wait for them until its linger is over.
        """
        peer.close_outgoing()
        peer.outgoing = socket = self._context.socket(zmq.DEALER)
        peer.sent = peer.taken = 0
        peer.dial_number += 1
        peer.dialled_at_s = time.monotonic()
        peer.redial_at_s = peer.dialled_at_s + min(self._peer_deadline_s, HANDSHAKE_DEADLINE_S)
        limit(socket, self._peer_deadline_s)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.routing_id = f"{self._worker_id}.{self._incarnation}.{peer.dial_number}".encode()
        socket.ipv6 = "[" in peer.endpoint
        if self._keys is not None:
            authenticate(socket, self._keys)
        with uninterrupted():
            socket.connect(peer.endpoint)
        self.say(peer, Sort.HELLO, Message("hello", peer.dial_number, x=self.hello))

    def say(self, peer: Peer, sort: Sort, message: Message) -> None:
        """Sends one of the mailbox's own short messages, now or once the connection is established."""
        head, memory = pack(sort, message, self._worker_id, self._incarnation)
        peer.unsaid.append((head, memory))
        self._catch_up_with(peer)

    def catch_up(self, peers: Mapping[int, Peer]) -> bool:
        """Sends what can be sent by now; returns whether more will follow soon, because connections are being established."""
        for worker_id in tuple(self._waiting):
            self._catch_up_with(peers[worker_id])
        now_s = time.monotonic() if self._waiting else 0.0
        return any(now_s < peers[worker_id].dialled_at_s + _HANDSHAKE_S for worker_id in self._waiting)

    def _catch_up_with(self, peer: Peer) -> None:
        while peer.unsaid and self.put(peer, *peer.unsaid[0]):
            peer.unsaid.popleft()
        (self._waiting.add if peer.unsaid else self._waiting.discard)(peer.worker_id)

    def put(self, peer: Peer, head: bytes, memory: memoryview | zmq.Frame | None = None) -> bool:
        """Hands one message to ZeroMQ; False: there is no connection to that peer."""
        if peer.outgoing is None:
            return False
        try:
            if memory is None:
                peer.outgoing.send(head, zmq.DONTWAIT)
            else:
                peer.outgoing.send(head, zmq.DONTWAIT | zmq.SNDMORE)
                peer.outgoing.send(memory, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True
