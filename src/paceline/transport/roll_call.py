"""Who is there when an operation of several workers has failed: who gives up says so in a store, and the others answer."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["RollCall"]

_BETWEEN_LOOKS_S = 0.01


class RollCall:
    """One worker's part of it.

    A worker that waits looks now and then whether another one has given up, and gives up, too; whoever has said nothing is
    missing.

    Args:
        store: of torch.distributed, where workers tell each other; a prefix of its own.
        worker_id: this worker.
        num_workers: that ought to answer.
        answer_s: how long a worker that gives up waits for the others' answers.
    """

    def __init__(self, store: Any, worker_id: int, num_workers: int, *, answer_s: float = 2.0) -> None:
        self._store = store
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._answer_s = answer_s

    def somebody_gave_up(self) -> bool:
        """Whether a worker has, or the store is gone."""
        try:
            return self._store.check(["gave up"])
        except RuntimeError:
            return True

    def give_up(self) -> tuple[set[int], set[int]] | None:
        """Tells the others; returns who is there, and who is not since its program had ended. None: the store is gone."""
        everyone = range(self._num_workers)
        present, left = {self._worker_id}, set[int]()
        until_s = time.monotonic() + self._answer_s
        try:
            self._store.set("gave up", "1")
            self._store.set(f"there/{self._worker_id}", "1")
            while len(present) + len(left) < self._num_workers and time.monotonic() < until_s:
                time.sleep(_BETWEEN_LOOKS_S)
                present = {worker for worker in everyone if self._store.check([f"there/{worker}"])}
                left = {w for w in everyone if w not in present and self._store.check([f"ended/{w}"])}
        except RuntimeError:
            return None
        return present, left
