"""Connections between machines are let in with the run's key alone (ZeroMQ's CURVE and ZAP)."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from paceline.transport.keys import Keys

__all__ = ["Authenticator", "authenticate"]


class Authenticator:
    """Answers ZeroMQ's question, for each connection to a socket, whether its key is the run's.

    Args:
        context: of the socket, which no other authenticator may be in.
        listener: the socket, before it listens.
        keys: of the run.

    Attributes:
        requests: ready to be read where a connection waits for `answer`.
    """

    def __init__(self, context: zmq.Context, listener: zmq.Socket, keys: Keys) -> None:
        self._public = z85.decode(keys.public)
        self.requests = context.socket(zmq.REP)
        self.requests.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whether to let a connection in (ZAP, RFC 27)
        listener.curve_server = True
        listener.curve_publickey, listener.curve_secretkey = keys

    def answer(self) -> None:
        """Lets in, or not, the connection that was asked about first."""
        _, request, _, _, _, _, *credentials = self.requests.recv_multipart()
        known = credentials == [self._public]
        verdict = [b"200", b"OK"] if known else [b"400", b"another key"]
        self.requests.send_multipart([b"1.0", request, *verdict, b"", b""])

    def close(self) -> None:
        """Lets nothing in any more."""
        self.requests.close(linger=0)


def authenticate(dialler: zmq.Socket, keys: Keys) -> None:
    """Makes a socket, before it connects, prove that it has the key, and ask the other end for the same."""
    dialler.curve_publickey, dialler.curve_secretkey = keys
    dialler.curve_serverkey = keys.public
