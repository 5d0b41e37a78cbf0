"""The workers that wait for a shard's answer, or at a meeting of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.ports.ports import Message

END = -1  # number of the last request
_WITHOUT_X = ("push-only", "meet", "tables")


class Due(NamedTuple):
    """An answer that is due."""

    worker: int
    number: int  # of its request
    applied_version: int


class Requests:
    """The workers' open requests."""

    def __init__(self) -> None:
        # Worker -> number of its update and the version that it became: answered as soon as the worker may read.
        self.decided: dict[int, tuple[int, int]] = {}
        # Worker -> number of its request, and the version that it waits for.
        self.fetches: dict[int, tuple[int, int]] = {}
        self.ends: set[int] = set()  # workers that wait until no worker trains any more
        self.without_x: set[int] = set()  # workers whose last request was not for parameters, or that have the newest
        self._joined: dict[int, int] = {}  # worker -> incarnation, until it leaves

    def hear(self, worker_id: int, message: Message) -> None:
        """Notes a worker's request; the shard itself adds a push to `decided` once it has decided on it."""
        (self.without_x.add if message.kind in _WITHOUT_X else self.without_x.discard)(worker_id)
        match message.kind:
            case "join":
                self.decided[worker_id] = (message.number, 0)
            case "fetch" | "lookup" | "meet" | "tables":
                self.fetches[worker_id] = (message.number, message.version)
            case "final":
                self.ends.add(worker_id)

    def joins(self, worker_id: int, incarnation: int, *, is_away: bool) -> bool:
        """Notes a request to join; returns False if the worker repeats one and is not away at a meeting.

        A worker repeats an unanswered request as soon as it can reach the server, which may have got the first one. If both
        counted, the second would move the worker to the clock of those that have trained meanwhile.
        """
        is_first = is_away or self._joined.get(worker_id) != incarnation
        self._joined[worker_id] = incarnation
        return is_first

    def leave(self, worker_id: int) -> None:
        self._joined.pop(worker_id, None)
        self.decided.pop(worker_id, None)

    def forget(self, worker_id: int) -> None:
        self.decided.pop(worker_id, None)
        self.fetches.pop(worker_id, None)
        self.ends.discard(worker_id)

    def readers(self, answers: list[Due]) -> list[int]:
        """The workers of these answers that get parameters."""
        return [one.worker for one in answers if one.worker not in self.without_x]

    def take_due(self, may_read: Callable[[int], bool], version: int, *, is_end: bool) -> list[Due]:
        due = [Due(one, *self.decided.pop(one)) for one in [*self.decided] if may_read(one)]
        for worker in [one for one, (_, wanted) in self.fetches.items() if version >= wanted]:
            due.append(Due(worker, self.fetches.pop(worker)[0], 0))
        if is_end:
            due += [Due(worker, END, 0) for worker in sorted(self.ends)]
            self.ends.clear()
        return due


_NOT_WAITING = ("push", "push-only", "join")  # sent only by workers that train


class Meetings:
    """Counts the meetings that each worker has reached; a worker tells the server before it waits at one.

    A waiting worker sends no gradient until the last has arrived, and the last may need an update without this worker's
    gradient, or parameters without its next update. As soon as one sends anything else, all have met and continue: from that
    message on the server waits for all of them again, so that no update leaves out a worker whose message is slower.

    A worker that joins counts as having reached all meetings that are over. If a dead server's count is lost, the others wait
    at one meeting until its successor takes the worker for dead.
    """

    def __init__(self) -> None:
        self._over = 0
        self._come: dict[int, int] = {}  # worker -> meetings reached
        self._last: dict[int, int] = {}  # worker -> number of its message, which may be sent twice

    def hear(self, worker: int, message: Message) -> frozenset[int]:
        """Handles any message of a worker; returns the workers that wait at a meeting."""
        if message.kind == "meet" and self._last.get(worker) != message.number:
            self._last[worker] = message.number
            self._come[worker] = max(self._come.get(worker, 0), self._over) + 1
        elif message.kind in _NOT_WAITING:
            self._over = max(self._over, self._come.get(worker, 0))
        return self._waiting()

    def _waiting(self) -> frozenset[int]:
        return frozenset(worker for worker, come in self._come.items() if come > self._over)

    def leave(self, worker: int) -> None:
        """Forgets a worker; if it rejoins, it counts as having reached the meetings that are over by then."""
        self._come.pop(worker, None)
        self._last.pop(worker, None)

    def state(self) -> dict[str, Any]:
        return {"over": self._over, "come": dict(self._come), "last": dict(self._last)}

    def load(self, state: dict[str, Any]) -> frozenset[int]:
        self._over, self._come, self._last = state["over"], dict(state["come"]), dict(state["last"])
        return self._waiting()
