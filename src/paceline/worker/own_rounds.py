"""An epoch's rounds in lockstep, where each worker has data of its own and some have more batches than others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.worker.gathering import Call

__all__ = ["OwnRounds"]

_EPOCH = Call(
    "worker.batches",
    "in lockstep all workers begin an epoch together, so each must leave the one before after as many steps as the others.",
)


class OwnRounds:
    """Counts a worker's rounds: an epoch has as many as the worker with the most batches has batches.

    A round is a step. A worker that steps more or less than once with a batch, or leaves an epoch early, would be waited for
    in a round while it waits for the others at the next epoch: where numbers of batches differ, both are refused.

    Costs: workers exchange their numbers once an epoch, or in each round if a loader has no length.

    Args:
        replica: the worker's, an `AttachedReplica`.
        gather: brings values of all workers together.
    """

    def __init__(self, replica: Any, gather: Callable[[Any, Call], list[Any]]) -> None:
        self._replica = replica
        self._gather = gather
        self._fewest = self._most = self._num_taken = self._begun_before = 0
        self._is_counted = True

    @property
    def _num_left(self) -> int:
        return self._most - self._num_taken

    def begin(self, num_batches: int | None) -> None:
        """An epoch begins; waits until it begins for all workers.

        Args:
            num_batches: of this worker; None: unknown.

        Raises:
            UsageError: this worker has left the epoch before early.
            WorkerLostError: a worker did not come within the deadline.
        """
        if self._is_uneven and (self._num_left or not self._has_stepped):
            raise UsageError(
                f"In lockstep all workers end an epoch together, and they have different numbers of batches ({self._range}),"
                " so none may leave it at a break: give worker.batches a loader of fewer batches, or take an asynchronous"
                " method such as ad-psgd."
            )
        numbers = self._gather(-1 if num_batches is None else num_batches, _EPOCH)
        self._is_counted = min(numbers) >= 0
        if not self._is_counted:
            numbers = [0]
        self._fewest, self._most, self._num_taken = min(numbers), max(numbers), 0
        self._begun_before = self._num_steps

    def take(self, *, has_batch: bool = True) -> bool:
        """Takes part in the next round, with a batch or without; returns whether there is a round."""
        if not self._is_counted:
            have = self._gather(int(has_batch), _EPOCH)
            self._most += any(have)
            self._fewest += all(have)
        if not self._num_left:
            return False
        self._num_taken += 1
        return True

    def check(self) -> None:
        """Call it when the loop is done with a batch.

        Raises:
            UsageError: numbers of batches differ, and the loop has not stepped once with this one.
        """
        if self._is_uneven and not self._has_stepped:
            raise UsageError(
                "In lockstep a worker that has no batch left takes part in the steps of the others, and workers have different"
                f" numbers of batches ({self._range}), so each batch needs one optimizer.step(): take larger batches instead"
                " of accumulating gradients, or an asynchronous method such as ad-psgd."
            )

    @property
    def _has_stepped(self) -> bool:
        """Whether this worker has made as many steps in this epoch as it has taken part in rounds."""
        return self._replica.idle and self._num_steps - self._begun_before == self._num_taken

    @property
    def _is_uneven(self) -> bool:
        return self._fewest < self._most

    @property
    def _range(self) -> str:
        return f"{self._fewest} to {self._most}"

    @property
    def _num_steps(self) -> int:
        """Made by this worker: one that has only begun, such as by looking at the model, is the next batch's."""
        return self._replica.num_begun - (not self._replica.idle)
