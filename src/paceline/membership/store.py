"""The store at a join point: what the workers of a run tell each other before they can reach each other."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import zmq

from paceline.transport.authentication import Authenticator
from paceline.transport.contexts import uninterrupted
from paceline.transport.keys import Keys

_MOST_BYTES = 1 << 20  # of a question or an answer
_MOST_KEYS = 1 << 16  # in the store
_MOST_STORED = 1 << 26  # characters, in keys and values together
_MOST_COUNTS = 1 << 16
_MOST_ADDED = 64
_WAITING_CONNECTIONS = 1024
_HANDSHAKE_MS = 5000


class Store:
    """A thread that answers every process that has the key.

    Attributes:
        port: where it listens.

    Raises:
        ZMQError: the address cannot be bound.
    """

    def __init__(self, endpoint: str, keys: Keys, values: dict[str, str] | None = None) -> None:
        self._values = dict(values or {})
        self._num_stored = sum(len(key) + len(value) for key, value in self._values.items())  # characters
        self._counts: dict[str, int] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        limit(self._router)
        self._router.setsockopt(zmq.BACKLOG, _WAITING_CONNECTIONS)
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with uninterrupted():
            self._authenticator = Authenticator(self._context, self._router, keys)
        try:
            self._router.ipv6 = "[" in endpoint
            with uninterrupted():
                self._router.bind(endpoint)
            self.port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except zmq.ZMQError:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="join-point", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._free()

    def _free(self) -> None:
        self._router.close(linger=0)
        self._authenticator.close()
        with uninterrupted():
            self._context.term()
        os.close(self._end)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for one in (self._router, self._authenticator.requests, self._end):
            poller.register(one, zmq.POLLIN)
        while self._end not in (ready := dict(poller.poll())):
            if self._authenticator.requests in ready:
                self._authenticator.answer()
            if self._router in ready:
                sender, *frames = self._router.recv_multipart()
                try:
                    verb, *question = json.loads(b"".join(frames))
                    answer = self._answer(verb, question)
                except Exception:  # a malformed question, such as another version's, must not end this thread
                    answer = {}
                self._router.send_multipart([sender, json.dumps(answer).encode()])

    def _answer(self, verb: str, question: list[Any]) -> Any:
        match verb, question:
            case "check", [list(keys)]:
                return all(key in self._values for key in keys)
            case "values", []:
                return self._values
            case "get", [key]:
                return self._values[key]
            case "set", [str(key), str(value)]:
                self._keep(key, value)
            case "add", [str(key), int(amount)]:
                if not 0 <= amount <= _MOST_ADDED or (key not in self._counts and len(self._counts) >= _MOST_COUNTS):
                    raise ValueError(amount)
                self._counts[key] = self._counts.get(key, 0) + amount
                return self._counts[key]
            case "compare_set", [str(key), str(expected), str(desired)]:
                if self._values.get(key, "") == expected:
                    self._keep(key, desired)
                return self._values.get(key, "")
            case _:
                raise ValueError(verb)
        return None

    def _keep(self, key: str, value: str) -> None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else len(key) + len(value)
        if (before is None and len(self._values) >= _MOST_KEYS) or self._num_stored + more > _MOST_STORED:
            raise ValueError("the store is full")
        self._values[key] = value
        self._num_stored += more


def limit(socket: zmq.Socket) -> None:
    """Limits what the other side can send, and how long it can take to prove that it has the key."""
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)
