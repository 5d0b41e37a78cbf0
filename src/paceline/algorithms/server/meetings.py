"""Which workers wait at a meeting of all workers, such as `worker.sum`: a server must not let others wait for them."""

from __future__ import annotations

from typing import Any

from paceline.ports.ports import Message

__all__ = ["Meetings"]

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
