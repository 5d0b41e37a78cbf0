"""A roll call after a failed collective operation: a worker that gives up says so in a store, and the others answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_BETWEEN_LOOKS_S = 0.01
_GAPS = 16  # recent gaps between operations; the longest bounds how long a worker may compute
_MOST_S = 60.0  # longest wait for answers; a long gap may have been an evaluation


class RollCall:
    """One worker's side of the roll call.

    A waiting worker checks regularly whether another one has given up, and then gives up, too; a worker that does not answer
    is missing. A worker that is still computing cannot answer yet, so the wait allows for the longest recent computation.
    """

    def __init__(self, store: Any, worker_id: int, num_workers: int, *, answer_s: float = 2.0) -> None:
        self._store = store  # a torch.distributed store with its own prefix, where workers announce themselves
        self._worker_id = worker_id
        self._num_workers = num_workers  # of the group, this worker included
        # How long a worker that gives up waits for the others' answers; twice the longest time between the ends of two
        # of its last operations, if that is longer, up to a minute.
        self._answer_s = answer_s
        self._ended_s: float | None = None
        self._gaps_s: deque[float] = deque(maxlen=_GAPS)

    def operation_ended(self) -> None:
        now_s = time.monotonic()
        if self._ended_s is not None:
            self._gaps_s.append(now_s - self._ended_s)
        self._ended_s = now_s

    def somebody_gave_up(self) -> bool:
        """Whether a worker has given up, or the store is gone."""
        try:
            return self._store.check(["gave up"])
        except RuntimeError:
            return True

    def give_up(self, on_wait: Callable[[], object] = lambda: None) -> tuple[set[int], set[int]] | None:
        """Tells the others; returns the present workers, and those that had ended before. None: the store is gone.

        Calls `on_wait` while it waits; an error that it raises ends the wait.
        """
        everyone = range(self._num_workers)
        present, left = {self._worker_id}, set[int]()
        answer_s = max(self._answer_s, min(_MOST_S, 2 * max(self._gaps_s, default=0.0)))
        until_s = time.monotonic() + answer_s
        try:
            self._store.set("gave up", "1")
            self._store.set(f"there/{self._worker_id}", "1")
            while len(present) + len(left) < self._num_workers and time.monotonic() < until_s:
                on_wait()
                time.sleep(_BETWEEN_LOOKS_S)
                present = {worker for worker in everyone if self._store.check([f"there/{worker}"])}
                left = {w for w in everyone if w not in present and self._store.check([f"ended/{w}"])}
        except RuntimeError:
            return None
        return present, left
