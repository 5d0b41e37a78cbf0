"""Who is let in where messages leave a machine: those that have the run's key, and prove it (ZeroMQ CURVE)."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from paceline.transport.keys import Keys

__all__ = ["Door", "prove"]


class Door:
    """Asks everyone who connects to a socket for the key.

    Args:
        context: of the socket, which no other door may be in.
        listener: the socket, before it listens.
        keys: of the run.

    Attributes:
        asked: ready to be read where somebody waits for `answer`.
    """

    def __init__(self, context: zmq.Context, listener: zmq.Socket, keys: Keys) -> None:
        self._public = z85.decode(keys.public)
        self.asked = context.socket(zmq.REP)
        self.asked.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whom to let in (ZAP, RFC 27)
        listener.curve_server = True
        listener.curve_publickey, listener.curve_secretkey = keys

    def answer(self) -> None:
        """Lets in, or not, who has asked first."""
        _, request, _, _, _, _, *credentials = self.asked.recv_multipart()
        known = credentials == [self._public]
        verdict = [b"200", b"OK"] if known else [b"400", b"another key"]
        self.asked.send_multipart([b"1.0", request, *verdict, b"", b""])

    def close(self) -> None:
        """Lets nobody in any more."""
        self.asked.close(linger=0)


def prove(dialler: zmq.Socket, keys: Keys) -> None:
    """Makes a socket, before it connects, prove that it has the key, and ask the other end for the same."""
    dialler.curve_publickey, dialler.curve_secretkey = keys
    dialler.curve_serverkey = keys.public
