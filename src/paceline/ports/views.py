"""The port through which workers that exchange messages in rounds go on without dead ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Survivors", "Views"]


class Survivors(Protocol):
    """What the others keep of a worker that dies, where its steps since their last exchange are lost."""

    def living(self) -> Sequence[int]:
        """Waits until every worker has come as far as this one, or has died; returns those that are alive.

        Raises:
            WorkerLostError: a worker has left in another way.
            RunStopped: the run was stopped while this worker waited.
        """
        ...

    def kept(self, worker: int) -> int:
        """In how many of its first rounds of batches a worker's steps cannot be lost any more."""
        ...


class Views(Survivors, Protocol):
    """Which workers take part in a round, the same for all workers: they may be in different rounds when one dies.

    A dead worker stays a member of all rounds that any worker has begun when its death becomes known.
    """

    def begin(self, round: int) -> Sequence[int]:
        """Begins a round; returns its members in the order of their ids.

        Raises:
            RunStopped: the run was stopped while this worker waited for the answer.
        """
        ...

    def sent(self, batches: int) -> None:
        """The others have what this worker made of its first `batches` rounds of batches: they keep it if it dies."""
        ...

    def has_died(self, worker: int) -> bool:
        """Whether a worker that cannot be reached has died; waits a while for the news."""
        ...
