"""The workers that wait for a shard's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.ports.ports import Message

__all__ = ["Due", "Requests"]

_END = -1  # number of the last request


class Due(NamedTuple):
    """An answer that is due."""

    worker: int
    number: int  # of its request
    applied_version: int


class Requests:
    """The workers' open requests.

    Attributes:
        decided: worker -> number of its update and the version that it became: answered as soon as the worker may read.
        fetches: worker -> number of its request, and the version that it waits for.
    """

    def __init__(self) -> None:
        self.decided: dict[int, tuple[int, int]] = {}
        self.fetches: dict[int, tuple[int, int]] = {}
        self.ends: set[int] = set()  # workers that wait until no worker trains any more
        self.without_x: set[int] = set()  # workers whose last request was not for parameters, or that have the newest

    def hear(self, worker_id: int, message: Message) -> None:
        """Notes a worker's request; the shard itself adds a push to `decided` once it has decided on it."""
        (self.without_x.add if message.kind in ("push-only", "meet") else self.without_x.discard)(worker_id)
        match message.kind:
            case "join":
                self.decided[worker_id] = (message.number, 0)
            case "fetch" | "meet":
                self.fetches[worker_id] = (message.number, message.version)
            case "final":
                self.ends.add(worker_id)

    def forget(self, worker_id: int) -> None:
        """Drops all requests of a worker."""
        self.decided.pop(worker_id, None)
        self.fetches.pop(worker_id, None)
        self.ends.discard(worker_id)

    def readers(self, answers: list[Due]) -> list[int]:
        """The workers of these answers that get parameters."""
        return [one.worker for one in answers if one.worker not in self.without_x]

    def take_due(self, may_read: Callable[[int], bool], version: int, *, is_end: bool) -> list[Due]:
        """Removes and returns the answers that are due at this version."""
        due = [Due(one, *self.decided.pop(one)) for one in [*self.decided] if may_read(one)]
        for worker in [one for one, (_, wanted) in self.fetches.items() if version >= wanted]:
            due.append(Due(worker, self.fetches.pop(worker)[0], 0))
        if is_end:
            due += [Due(worker, _END, 0) for worker in sorted(self.ends)]
            self.ends.clear()
        return due
