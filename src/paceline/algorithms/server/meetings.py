"""Which workers wait where all of them meet, as in `worker.sum`: a server must not let the others wait for them."""

from __future__ import annotations

from typing import Any

from paceline.ports.ports import Message

__all__ = ["Meetings"]

_NOT_WAITING = ("push", "push-only", "join")  # what only a worker sends that trains


class Meetings:
    """Counts the meetings that every worker has come to, as it tells the server before it waits there.

    A worker that waits brings nothing until the last has come, and the last may need an update that lacks this worker's
    gradient, or parameters that lack its next update. As soon as one sends something else, all have met and go on: so they
    are waited for again from the same message on, and no update is made without those whose message is slower.

    A worker that joins has come to as many as are over. Where the count of a dead server is lost, the others wait at one
    meeting for its successor to take the worker for dead.
    """

    def __init__(self) -> None:
        self._over = 0
        self._come: dict[int, int] = {}  # worker -> meetings, where it has told
        self._last: dict[int, int] = {}  # worker -> number of its message, which may be sent twice

    def hear(self, worker: int, message: Message) -> frozenset[int]:
        """Takes what any message of a worker says; returns the workers that are at a meeting which is not over."""
        if message.kind == "meet" and self._last.get(worker) != message.number:
            self._last[worker] = message.number
            self._come[worker] = max(self._come.get(worker, 0), self._over) + 1
        elif message.kind in _NOT_WAITING:
            self._over = max(self._over, self._come.get(worker, 0))
        return self._waiting()

    def _waiting(self) -> frozenset[int]:
        return frozenset(worker for worker, come in self._come.items() if come > self._over)

    def leave(self, worker: int) -> None:
        """Its successor counts from what is over then."""
        self._come.pop(worker, None)
        self._last.pop(worker, None)

    def state(self) -> dict[str, Any]:
        return {"over": self._over, "come": dict(self._come), "last": dict(self._last)}

    def load(self, state: dict[str, Any]) -> frozenset[int]:
        self._over, self._come, self._last = state["over"], dict(state["come"]), dict(state["last"])
        return self._waiting()
