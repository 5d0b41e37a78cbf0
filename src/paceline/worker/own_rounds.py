"""An epoch's rounds in lockstep, if each worker has its own data and some have more batches than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from paceline.errors import UsageError
from paceline.worker.gathering import Call

__all__ = ["OwnRounds"]

_NO_BATCH = object()
_EPOCH = Call(
    "worker.batches",
    "in lockstep all workers begin an epoch together, so each must make as many steps in an epoch as the others.",
)


class OwnRounds:
    """Counts a worker's rounds: an epoch has as many as the worker with the most batches has batches.

    Costs: workers exchange their numbers once an epoch, or in each round if a loader has no length.

    Args:
        replica: the worker's, which gets the number of each round, so that workers compare the numbers when they step.
        gather: brings values of all workers together.
    """

    def __init__(self, replica: Any, gather: Callable[[Any, Call], list[Any]]) -> None:
        self._replica = replica
        self._gather = gather
        self._num_left = 0
        self._is_counted = True

    def epoch(self, batches: Iterator[Any], loader: Any, stopped: Callable[[], bool]) -> Iterator[Any]:
        """An epoch's batches, and the last one again until the other workers have had theirs.

        Raises:
            UsageError: this worker has no batch, but others have.
        """
        num_batches: int | None = None
        with suppress(TypeError, NotImplementedError):
            num_batches = len(loader)
        self.begin(num_batches)
        batch: Any = _NO_BATCH
        for batch in batches:
            self.take()
            yield batch
        while not stopped() and self.take(has_batch=False):
            if batch is _NO_BATCH:
                raise UsageError(
                    "This worker's loader has no batches, but other workers' have some: in lockstep each needs at "
                    "least one. Or use an asynchronous method such as ad-psgd."
                )
            self._replica.begin(self._replica.now_s(), -1, 0)
            yield batch

    def begin(self, num_batches: int | None) -> None:
        """Begins an epoch; waits until it begins for all workers.

        Args:
            num_batches: of this worker; None: unknown.

        Raises:
            WorkerLostError: a worker did not arrive within the deadline.
        """
        numbers = self._gather(-1 if num_batches is None else num_batches, _EPOCH)
        self._is_counted = min(numbers) >= 0
        self._num_left = max(numbers)

    def take(self, *, has_batch: bool = True) -> bool:
        """Takes part in the next round, with a new batch or without; returns whether a round follows."""
        if not self._is_counted:
            self._num_left = max(self._gather(int(has_batch), _EPOCH))
        self._num_left -= 1
        self._replica.round += 1
        return self._num_left >= 0
