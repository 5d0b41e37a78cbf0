"""The port through which workers that exchange messages in rounds continue without dead ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MODEL = "model"  # the kind of a neighbour's message; its number is the round, its version says what `Views.sent` does
LOST = "lost"  # the kind of what a worker's own mailbox gives it instead of a model that will not come


class Survivors(Protocol):
    """Which workers are alive, and which steps of a dead worker survive."""

    def living(self) -> Sequence[int]:
        """Waits until every worker has come as far as this one, or has died; returns those that are alive.

        Raises:
            WorkerLostError: a worker has left in another way.
            RunStopped: the run was stopped while this worker waited.
        """
        ...

    def kept(self, worker: int) -> int:
        """How many rounds of batches, from the first on, have steps of this worker that survive its death."""
        ...


class ElasticGroup(Survivors, Protocol):
    """Workers that continue without dead ones, and that replacements can join.

    Attributes:
        members: in the order of their ids, as far as this worker knows.
    """

    @property
    def members(self) -> Sequence[int]: ...

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        """Counts newcomers (worker id: incarnation) among the members from now on; all members call it at the same place.

        Returns: what a newcomer needs to take part from there on.
        """
        ...


class Views(ElasticGroup, Protocol):
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
        """Notes that the models sent so far contain this worker's steps of the first `batches` rounds of batches."""

    def got(self, worker: int, batches: int) -> None:
        """Notes that this worker, a newcomer, begins with a model that contains another one's steps, counted as by `sent`."""

    def has_died(self, worker: int) -> bool:
        """Whether a worker that cannot be reached has died; waits a while for the news."""
        ...

    def announce(self, newcomers: Mapping[int, int]) -> None:
        """Tells all members that newcomers (worker id: incarnation) come.

        Only the first member does so, after it has sent its models. Has no effect while others that were announced have not
        come.
        """

    def coming(self, round: int) -> Mapping[int, int]:
        """The newcomers that all members let in before this round, or as soon as they can after that.

        All members ask before they begin each round, and get the same answer, once.
        """
        ...
