"""How the mailboxes of a run find each other: through a store, which others may write and which may be gone later."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from paceline.errors import name_workers
from paceline.transport.local_socket import is_endpoint, is_own

_MOST_DIGITS = 9  # of an incarnation, which has 32 bits in a message


class Entry(NamedTuple):
    """A peer's entry in the store."""

    incarnation: int = -1  # of the process at the endpoint
    endpoint: str = ""  # empty: not asked for, or none that may be dialled
    ended: int = -1  # the highest incarnation known to have ended


class Directory:
    """One worker's entries in the run's store, and its view of the others'."""

    def __init__(self, store: Any, worker_id: int, incarnation: int, *, is_local: bool) -> None:
        self._store: Any = store
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._is_local = is_local  # whether all workers are processes of one user on one machine
        self._elsewhere: set[int] = set()  # peers at addresses where no worker of this run can be

    def enter(self, endpoint: str) -> None:
        self._store.set(f"peer/{self._worker_id}", f"{self._incarnation} {endpoint}")

    def leave(self) -> None:
        mark_ended(self._store, self._worker_id, self._incarnation)

    def close(self) -> None:
        self._store = None

    def look_up(self, worker_id: int, *, endpoint: bool) -> Entry:
        """A peer's entry, with its endpoint if `endpoint`; raises `RuntimeError` if the store is gone."""
        told = read_peer(self._read(f"peer/{worker_id}")) if endpoint else None
        if told is not None and not self.may_dial(told[1]):
            self._elsewhere.add(worker_id)
            told = None
        ended = read_incarnation(self._read(f"ended/{worker_id}").decode("ascii", "replace"))
        return Entry(*(told or (-1, "")), -1 if ended is None else ended)

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def may_dial(self, endpoint: str) -> bool:
        """Whether only a worker of this run can answer there, because the kernel or the key keeps all others out."""
        return is_own(endpoint) if self._is_local else endpoint.startswith("tcp://")

    def why_missing(self, missing: Collection[int], dialled: Collection[int]) -> str:
        """Names the peers that have not arrived, and those that do not answer; `dialled`: peers with a known endpoint."""
        silent = sorted(self._elsewhere.union(dialled).intersection(missing))
        absent = sorted(set(missing).difference(silent))
        parts = [f"{name_workers(absent)} {'have' if absent[1:] else 'has'} not come"] if absent else []
        if silent:
            have, do = ("have", "do") if silent[1:] else ("has", "does")
            parts.append(f"{name_workers(silent)} {have} come but {do} not answer")
        return " and ".join(parts)


def mark_ended(store: Any, worker_id: int, incarnation: int) -> None:
    """Records in the store that this incarnation has ended or died, so that no new peer waits for its answer."""
    store.set(f"ended/{worker_id}", str(incarnation))


def read_peer(value: bytes) -> tuple[int, str] | None:
    """Incarnation and endpoint from a worker's entry; None if it is malformed, since others may write the store."""
    incarnation, _, endpoint = value.decode("ascii", "replace").partition(" ")
    number = read_incarnation(incarnation)
    return (number, endpoint) if number is not None and is_endpoint(endpoint) else None


def read_incarnation(text: str) -> int | None:
    """An incarnation from text; None if malformed."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS else None
