"""Admits only connections that have the run's key (ZeroMQ's CURVE and ZAP)."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from paceline.transport.keys import Keys


class Authenticator:
    """Tells ZeroMQ, for each connection to a socket, whether its key is the run's.

    Args:
        context: of the socket; it must have no other authenticator.
    """

    def __init__(self, context: zmq.Context, listener: zmq.Socket, keys: Keys) -> None:
        self._public = z85.decode(keys.public)
        self.requests = context.socket(zmq.REP)  # readable when a connection waits for `answer`
        self.requests.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whether to let a connection in (ZAP, RFC 27)
        listener.curve_server = True
        listener.curve_publickey, listener.curve_secretkey = keys

    def answer(self) -> None:
        """Admits or rejects the connection that has waited longest."""
        _, request, _, _, _, _, *credentials = self.requests.recv_multipart()
        known = credentials == [self._public]
        verdict = [b"200", b"OK"] if known else [b"400", b"another key"]
        self.requests.send_multipart([b"1.0", request, *verdict, b"", b""])

    def close(self) -> None:
        self.requests.close(linger=0)


def authenticate(dialler: zmq.Socket, keys: Keys) -> None:
    """Makes a socket, before it connects, prove that it has the key and demand the same of the other end."""
    dialler.curve_publickey, dialler.curve_secretkey = keys
    dialler.curve_serverkey = keys.public
