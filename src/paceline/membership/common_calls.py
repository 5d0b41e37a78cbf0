"""Calls that all workers of a run make together, such as `worker.sum` after each epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any


class CommonCalls:
    """The workers' values, until a call has all of them.

    A dead worker's replacement begins its loop again, so its first calls are of epochs that the others have left. There it is
    alone. The others wait for it from the epoch in which it has its first batch.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._since = dict.fromkeys(workers, 0)  # who is waited for, and from which epoch on
        self._replacements: set[int] = set()
        self._left: set[int] = set()
        self._values: dict[int, tuple[int, Any]] = {}  # by worker: the epoch that its loop has reached, and its value
        self._epoch = 0  # of the newest call of workers that replace none

    @property
    def members(self) -> Collection[int]:
        """The workers that are waited for."""
        return self._since.keys()

    def leave(self, worker: int) -> None:
        self._left.add(worker)
        self._since.pop(worker, None)
        self._values.pop(worker, None)

    def replace(self, worker: int) -> None:
        self.leave(worker)
        self._left.remove(worker)
        self._replacements.add(worker)

    def enter(self, worker: int, epoch: int) -> None:
        """A replacement has its first batch, in this epoch; nothing counts once it has left."""
        if worker not in self._left:
            self._since[worker] = epoch

    def bring(self, worker: int, epoch: int, value: Any) -> None:
        """A worker calls; `epoch`: that its loop has reached."""
        self._values[worker] = epoch, value
        if worker not in self._replacements:
            self._epoch = max(self._epoch, epoch)

    def take(self) -> dict[int, Any]:
        """Removes and returns the values of a complete call, by worker in the order of their arrival; empty: there is none."""
        if not self._values:
            return {}
        for worker, (epoch, _) in self._values.items():
            if worker in self._replacements and (worker not in self._since or epoch < self._epoch):
                return {worker: self._values.pop(worker)[1]}
        if self._since.keys() <= self._replacements:
            self._epoch = min(epoch for epoch, _ in self._values.values())
        if any(since <= self._epoch and worker not in self._values for worker, since in self._since.items()):
            return {}
        come = [one for one, (at, _) in self._values.items() if at <= self._epoch or one not in self._replacements]
        return {worker: self._values.pop(worker)[1] for worker in come}
