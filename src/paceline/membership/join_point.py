"""The join point: one address at which the workers of a run meet. The first to come holds it, and may die."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Literal, TypeVar

import zmq

from paceline.errors import UsageError, WorkerLostError
from paceline.membership.rendezvous import machine_of_this
from paceline.membership.store import Store, limit
from paceline.transport.authentication import authenticate
from paceline.transport.contexts import uninterrupted
from paceline.transport.keys import Keys, load_keys, own_keys

_BACKLOG = 1024  # waiting connections, such as probes of whether a worker is alive
_SLICE_S = 0.5
_MOST_SLICES = 10  # an answer that takes longer than this many slices counts as lost
_BETWEEN_TRIES_S = 0.1
_CONNECT_S = 2.0
_MOST_NUMBER = 1 << 53
_T = TypeVar("_T", int, str, bool, dict, None)


class JoinPointLostError(WorkerLostError):
    """The join point is gone or does not answer: a RuntimeError, as for a torch store."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"The join point {address} is gone, or gives no answer that makes sense: start the run again at another one."
        )


class JoinPoint:
    """A worker's (or agent's) access to the join point: a store with the methods of a torch store that mailboxes call.

    Binds the address if it is this machine's and free, and holds the store from then on; otherwise dials it. A process
    without the key does not get past the handshake. After one unanswered question the join point counts as lost, and is not
    asked again. The object belongs to the process that made it: in a fork, it counts as lost.

    Unlike a TCPStore, it asks for a key: any process that reaches a TCPStore can read, change and fill it.

    Args:
        address: HOST:PORT.
        key: the key file, or its contents; None: the user's own key, if only this machine can reach the address.
        deadline_s: how long to wait for the process that holds the address.
        role: the first to come holds the address (`either`); this process holds it, at any free port if the port is 0
            (`holder`); or another process holds it (`guest`).

    Attributes:
        holds: whether this process holds the store.
        lost: whether the join point is gone.

    Raises:
        UsageError: the address or key is wrong, or the port is in use by something else.
        WorkerLostError: no process held the address within the deadline.
    """

    def __init__(
        self,
        address: str,
        key: Path | Keys | None,
        deadline_s: float,
        *,
        role: Literal["either", "holder", "guest"] = "either",
    ) -> None:
        self.address = address  # HOST:PORT, where the others find it; `where`: as Python's sockets take it
        self.where = _resolve(address, any_port=role == "holder")
        is_local = ipaddress.ip_address(self.where[0]).is_loopback
        if key is None and not is_local:
            raise UsageError(
                f"Other machines can reach {address}, so traffic between workers must be encrypted: make a key with "
                "`paceline key FILE`, copy it to every machine, and give --key FILE (or PACELINE_KEY=FILE)."
            )
        self._keys = keys = own_keys() if key is None else load_keys(key)
        # The address of this machine by which the others reach it; None: all are on this machine.
        self.host: str | None = self.where[0]
        self.key = key  # encrypts the workers' messages; needed with `host`
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._dial(keys, deadline_s, role)
        try:
            answers = self._answers()
            if not answers and not self.holds:  # the process that held the address may have died just now
                self._hang_up()
                self._dial(keys, deadline_s, role)
                answers = self._answers()
            if not answers:
                raise self._unanswered()
            if is_local:
                self.host = self.key = None
                self._check_same_machine()
        except BaseException:
            self.close()
            raise

    def _dial(self, keys: Keys, deadline_s: float, role: str) -> None:
        self.lost = False
        self._point = self._hold_or_probe(keys, deadline_s, role)
        self.holds = self._point is not None
        if role == "holder" and self._point is not None:
            self.where = (self.where[0], self._point.port)
            self.address = endpoint(self.where).removeprefix("tcp://")
        self._context = zmq.Context()
        self._asker = self._context.socket(zmq.DEALER)
        self._asker.ipv6 = ":" in self.where[0]
        limit(self._asker)
        self._asker.setsockopt(zmq.RECONNECT_IVL, -1)
        authenticate(self._asker, keys)
        with uninterrupted():
            self._monitor = self._asker.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            self._asker.connect(endpoint(self.where))
        self._poller = zmq.Poller()
        for one in (self._asker, self._monitor):
            self._poller.register(one, zmq.POLLIN)

    def _hang_up(self) -> None:
        with uninterrupted():
            self._asker.disable_monitor()
            for one in (self._asker, self._monitor):
                one.close(linger=0)
            self._context.term()

    def _answers(self) -> bool:
        with contextlib.suppress(JoinPointLostError):
            return self.check([])
        return False

    def _unanswered(self) -> UsageError:
        try:
            socket.create_connection(self.where[:2], timeout=_CONNECT_S).close()
        except OSError as error:
            return UsageError(
                f"{self.address} cannot be reached ({error.strerror or error}): start the network interface that has this"
                " address (`ip link set lo up` for 127.0.0.1), or name another with --join."
            )
        return UsageError(
            f"The process that listens at {self.address} does not accept this key: all workers need the same --key "
            "(or PACELINE_KEY). If it is not a run, choose a free port for --join, the same for all."
        )

    def _check_same_machine(self) -> None:
        # The kernel lets in only the same user's processes, and only those that can see each other.
        here = f"{machine_of_this()} {os.geteuid()}"
        if self.agree("machine", here) != here:
            raise UsageError(
                f"The workers at {self.address} belong to other users or run in other containers: join at an address "
                "of this machine that is not loopback, with --key FILE."
            )

    # Asking

    def agree(self, name: str, wanted: str) -> str:
        """The value of `name` from the first worker to join, which decides."""
        return self.compare_set(name, "", wanted).decode()

    def agree_words(self, name: str, wanted: dict[str, str]) -> dict[str, str]:
        with contextlib.suppress(ValueError, RecursionError):
            words = json.loads(self.agree(name, json.dumps(wanted)))
            if isinstance(words, dict) and all(isinstance(one, str) for one in words.values()):
                return words
        raise JoinPointLostError(self.address)

    def add(self, key: str, amount: int) -> int:
        """As in torch's stores, like the following methods; all raise `JoinPointLostError`.

        Counts are separate from values, and grow by at most 64 per call, so that no worker can make the others skip all
        batches.
        """
        return self._ask(int, "add", key, amount)

    def set(self, key: str, value: str) -> None:
        self._ask(type(None), "set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask(str, "get", key).encode()

    def check(self, keys: list[str]) -> bool:
        return self._ask(bool, "check", keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it holds `expected` ("": nothing); returns what it holds then."""
        return self._ask(str, "compare_set", key, expected, desired).encode()

    def values(self) -> dict[str, str]:
        return self._ask(dict, "values")

    def hold(self, values: dict[str, str]) -> None:
        """Holds the address from now on, with these values, unless another process does."""
        with self._lock, contextlib.suppress(zmq.ZMQError):
            if not self._context.closed:
                self._point, self.holds = Store(endpoint(self.where), self._keys, values), True

    def listen(self) -> socket.socket:
        """A socket at the address by which the others reach this machine, at a port that the system chooses."""
        host = self.host or "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)

    def close(self) -> None:
        """Leaves; ends the store if this process holds it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._context.closed:
                return
            self.lost = True
            self._hang_up()
        if self._point is not None:
            self._point.close()

    def _ask(self, kind: type[_T], *question: Any) -> _T:
        if os.getpid() != self._pid:  # in a fork; another thread may have held the lock, too
            raise JoinPointLostError(self.address)
        with self._lock:
            if not self.lost:
                # Again: the join point has gone since the last question.
                with contextlib.suppress(ValueError, RecursionError, zmq.Again):
                    self._asker.send(json.dumps(question).encode(), zmq.DONTWAIT)
                    raw = self._answer_in_time()
                    if raw is not None and _is_plain(answer := json.loads(raw), kind):
                        return answer
            self.lost = True
            raise JoinPointLostError(self.address)

    def _answer_in_time(self) -> bytes | None:
        # Counted in slices, so that a worker that was suspended for a while does not mistake that time for a lost answer.
        for _ in range(_MOST_SLICES):
            ready = dict(self._poller.poll(round(_SLICE_S * 1e3)))
            if self._asker in ready:
                return self._asker.recv_multipart()[0]
            if self._monitor in ready:
                return None
        return None

    # Connecting

    def _hold_or_probe(self, keys: Keys, deadline_s: float, role: str) -> Store | None:
        """The store, which this process holds from now on; None: another process holds it and can be reached."""
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                if role != "guest":
                    return Store(endpoint(self.where), keys)
            except zmq.ZMQError as error:
                if role == "holder" or error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    raise UsageError(
                        f"Cannot listen at {self.address}: {error.strerror}. Choose another port."
                    ) from None
            try:
                with socket.create_connection(self.where[:2], timeout=_CONNECT_S) as probe:
                    self.host = probe.getsockname()[0]
                    return None
            except OSError as error:
                if time.monotonic() > until_s:
                    raise WorkerLostError(
                        f"No answer from the join point {self.address} within {deadline_s:g} s ({error.strerror or error}):"
                        " start the first worker on that machine, and check that its port can be reached."
                    ) from None
            time.sleep(_BETWEEN_TRIES_S)


def endpoint(where: tuple[Any, ...]) -> str:
    """A socket's address as ZeroMQ writes it."""
    host, port = where[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _resolve(address: str, *, any_port: bool = False) -> tuple[Any, ...]:
    host, _, port = address.rpartition(":")
    try:
        if not host or not (0 if any_port else 1) <= int(port) < 65536:
            raise ValueError
        return socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
    except ValueError:
        raise UsageError(f"A join point must be HOST:PORT, such as 10.0.0.1:29400, not {address!r}.") from None
    except OSError as error:
        raise UsageError(f"The host of {address} is not known here ({error.strerror}): give its IP address.") from None


def _is_plain(answer: Any, kind: type) -> bool:
    if kind is dict:
        return type(answer) is dict and all(type(value) is str for value in answer.values())
    return type(answer) is kind and (kind is not int or abs(answer) < _MOST_NUMBER)
