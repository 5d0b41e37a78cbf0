"""The join point: one address at which the workers of a run meet. Whoever comes first holds it; later it may be gone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import UsageError, WorkerLostError
from paceline.transport.keys import load_keys

__all__ = ["Meeting", "MeetingLostError"]

_SLICE_S = 0.5
_MOST_SLICES = 10  # an answer that takes longer than so many slices will not come
_BETWEEN_TRIES_S = 0.1
_CONNECT_S = 2.0
_dist: Any = dist  # its type stubs do not name the stores


class MeetingLostError(WorkerLostError):
    """The join point is gone, or does not answer: a RuntimeError, as where a store of torch's own is."""

    def __init__(self, address: str) -> None:
        super().__init__(f"The join point {address} is gone, or does not answer: start the run again at another one.")


class Meeting:
    """A worker's (or agent's) place at the join point: a store of torch's, with a deadline on whatever is asked of it.

    Binds the address if it is this machine's and free, and holds the store from then on; otherwise dials it. A TCPStore that
    is asked over a link that was cut waits for ever, so a thread asks for us. What has once not answered is never asked again.

    No secret is said here: anybody who reaches the address may read along. Of a key there is only a digest.

    Args:
        address: HOST:PORT.
        key: the key file; required where other machines can reach the address.
        deadline_s: how long to wait for whoever holds the address.

    Attributes:
        host: the address of this machine by which the others reach it.
        holds: whether this process holds the store.
        lost: whether the join point is gone.

    Raises:
        UsageError: the address or key is wrong, the port is in use by something else, or others have another key.
        WorkerLostError: nobody was there within the deadline.
    """

    def __init__(self, address: str, key: Path | None, deadline_s: float) -> None:
        self.address = address
        self._where = _resolve(address)
        if key is None and not ipaddress.ip_address(self._where[0]).is_loopback:
            raise UsageError(
                f"Other machines can reach {address}, so what workers send each other must be encrypted: make a key with"
                " `paceline key FILE`, copy it to every machine, and give --key FILE (or PACELINE_KEY=FILE)."
            )
        digest = "none" if key is None else hashlib.sha256(load_keys(key).public).hexdigest()[:16]
        self.lost = False
        self.host = self._where[0]
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        listening = self._listen_or_dial(deadline_s)
        self.holds = listening is not None
        threading.Thread(target=self._serve, args=(listening,), name="join-point", daemon=True).start()
        try:
            self._await_answer()
        except MeetingLostError:
            raise UsageError(
                f"Something else listens at {address}: choose a free port for --join, the same for all workers."
            ) from None
        if (agreed := self.agree("key", digest)) != digest:
            has, want = ("no key file", "has one") if key is None else ("this key file", "does not have it")
            if agreed == "none":
                want = "has none"
            raise UsageError(
                f"The run at {address} {want}, but this worker came with {has}: all need the same --key (or PACELINE_KEY)."
            )

    # Asking

    def agree(self, name: str, wanted: str) -> str:
        """What the first to come said about `name`; who comes first is taken at its word."""
        return self.compare_set(name, "", wanted).decode()

    def add(self, key: str, amount: int) -> int:
        """As of torch's stores, as are the following; all raise `MeetingLostError`."""
        return self._ask(lambda store: store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(lambda store: store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets a key if it holds `expected` ("": nothing); returns what it holds then."""
        return self._ask(lambda store: store.compare_set(key, expected, desired))

    def close(self) -> None:
        """Leaves; whoever holds the store takes it along."""
        self._requests.put(None)

    def _ask(self, operation: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self.lost:
                raise MeetingLostError(self.address)
            self._requests.put(operation)
            return self._await_answer()

    def _await_answer(self) -> Any:
        # Counted in slices, so that a worker that was stopped for a while does not take its own silence for the other's.
        for _ in range(_MOST_SLICES):
            with contextlib.suppress(queue.Empty):
                answer = self._answers.get(timeout=_SLICE_S)
                if not isinstance(answer, Exception):
                    return answer
                break
        self.lost = True
        raise MeetingLostError(self.address)

    def _serve(self, listening: int | None) -> None:
        """The thread that asks: the only one that may have to wait for ever."""
        host, port = self._where[:2]
        more: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening, "use_libuv": False}
        try:
            store = _dist.TCPStore(
                host,
                port,
                is_master=listening is not None,
                wait_for_workers=False,
                timeout=timedelta(seconds=_SLICE_S * _MOST_SLICES),
                **more,
            )
            self._answers.put(None)
            while (operation := self._requests.get()) is not None:
                self._answers.put(operation(store))
        except Exception as error:  # whoever asked decides what it means
            self._answers.put(error)

    # Getting there

    def _listen_or_dial(self, deadline_s: float) -> int | None:
        """A descriptor of the listening socket; None: somebody else listens there, and can be reached."""
        until_s = time.monotonic() + deadline_s
        while True:
            listening = self._listen()
            if listening is not None:
                return listening
            try:
                with socket.create_connection(self._where[:2], timeout=_CONNECT_S) as probe:
                    self.host = probe.getsockname()[0]
                    return None
            except OSError as error:
                if time.monotonic() > until_s:
                    raise WorkerLostError(
                        f"Nobody was at the join point {self.address} within {deadline_s:g} s ({error.strerror or error}):"
                        " start the first worker on that machine, and check that its port can be reached."
                    ) from None
            time.sleep(_BETWEEN_TRIES_S)

    def _listen(self) -> int | None:
        with contextlib.ExitStack() as undo:
            family = socket.AF_INET6 if ":" in self._where[0] else socket.AF_INET
            door = undo.enter_context(socket.socket(family))
            door.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # the last run's port rests for a minute otherwise
            try:
                door.bind(self._where)
                door.listen(1024)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    return None
                raise UsageError(f"Cannot listen at {self.address}: {error.strerror}. Choose another port.") from None
            return door.detach()


def _resolve(address: str) -> tuple[Any, ...]:
    host, _, port = address.rpartition(":")
    try:
        if not host or not 0 < int(port) < 65536:
            raise ValueError
        return socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
    except ValueError:
        raise UsageError(f"A join point is written HOST:PORT, as 10.0.0.1:29400, and not {address!r}.") from None
    except OSError as error:
        raise UsageError(f"The host of {address} is not known here ({error.strerror}): give its IP address.") from None
