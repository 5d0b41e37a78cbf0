"""Which workers take part in rounds of messages, as far as one of them knows, and what it knows about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import torch

_PROBE_EVERY_S = 0.1  # how often a wait checks whether an unreachable worker has ended


class _Status(IntEnum):
    MEMBER = 0
    GONE = 1  # has died, or has left the run in order
    FAILED = 2  # its program has ended early


class _Standing(NamedTuple):
    """What is known about a worker; newer knowledge compares greater."""

    incarnation: int = 0
    status: _Status = _Status.MEMBER


class Progress(NamedTuple):
    """How far a worker is when it proposes a view."""

    view: int  # the number of the proposed view
    round: int  # the last one that it has begun
    prepared: int  # the view in which it has this round's result; -1: none


class RoundMembers:
    """The numbered view of one worker: the members of the next round, or of its repetition.

    A worker proposes the next view whenever its knowledge changes: a member has died, left or failed, a connection was
    restored, or newcomers come in. A proposal says all that it knows, and how far it is. The view begins once all living
    members have proposed the same number.

    A worker is gone if it says so, or if its connection has ended and its machine says that no process listens at its
    address. A silent worker is not gone.

    Args:
        worker_id: this worker.
        num_workers: of the run; all are members at first.
        has_ended: whether an incarnation of a worker is known to have ended.
        incarnations: of the workers; empty: 0.
        now_s: the time.

    Attributes:
        ids: of the members, in order.
        view: its number.
        proposed: the number that this worker has proposed last.
    """

    def __init__(
        self,
        worker_id: int,
        num_workers: int,
        has_ended: Callable[[int, int], bool],
        incarnations: Sequence[int],
        now_s: Callable[[], float],
    ) -> None:
        self._worker_id, self._workers, self._has_ended, self._now_s = worker_id, range(num_workers), has_ended, now_s
        self.ids: Sequence[int] = tuple(self._workers)
        self.view = self.proposed = 0
        self._standings = [_Standing(one) for one in incarnations or [0] * num_workers]
        self._told: dict[int, Progress] = {}  # what each worker has said last
        self._unreachable: dict[int, float] = {}  # worker -> since when
        self._probe_at_s = -math.inf

    @property
    def others(self) -> list[int]:
        return [one for one in self.ids if one != self._worker_id]

    @property
    def changes(self) -> bool:
        """Whether a newer view has been proposed."""
        return self.proposed > self.view

    @property
    def failed(self) -> list[int]:
        return [one for one in self._workers if self._standings[one].status is _Status.FAILED]

    @property
    def living(self) -> list[int]:
        return [one for one in self.ids if self._is_member(one)]

    def incarnation(self, worker: int) -> int:
        """The newest incarnation of a worker that is or was a member."""
        return self._standings[worker].incarnation

    def _is_member(self, worker: int, incarnation: int | None = None) -> bool:
        standing = self._standings[worker]
        return standing.status is _Status.MEMBER and incarnation in (None, standing.incarnation)

    def _propose(self) -> None:
        self.proposed = max(self.proposed, self.view) + 1

    # What this worker finds out

    def lose(self, worker: int, *, has_failed: bool = False) -> None:
        """A member takes part in no further round."""
        self._unreachable.pop(worker, None)
        if self._is_member(worker):
            status = _Status.FAILED if has_failed else _Status.GONE
            self._standings[worker] = self._standings[worker]._replace(status=status)
            self._propose()

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker says that it takes part in no further round; it may not have been let in yet."""
        self.lose(worker)
        self._standings[worker] = max(self._standings[worker], _Standing(incarnation, _Status.GONE))

    def disconnect(self, worker: int, incarnation: int, *, has_ended: bool) -> None:
        """A worker's connection has ended; `has_ended`: its program has, and without leaving the rounds first."""
        if self._is_member(worker, incarnation):
            if has_ended:
                self.lose(worker, has_failed=True)
            else:
                self.miss(worker)

    def restore(self, worker: int, incarnation: int) -> None:
        """A member can be reached again. What was on its way is lost, so all say again what they have to say."""
        if self._is_member(worker, incarnation):
            self._unreachable.pop(worker, None)
            self._propose()

    def miss(self, worker: int) -> None:
        """A member cannot be reached."""
        if worker not in self._unreachable and self._is_member(worker):
            self._unreachable[worker], self._probe_at_s = self._now_s(), -math.inf

    def lose_ended(self) -> bool:
        """Loses unreachable members whose processes have ended; returns whether there were any."""
        if not self._unreachable or self._now_s() < self._probe_at_s:
            return False
        ended = [one for one in self._unreachable if self._has_ended(one, self.incarnation(one))]
        for one in ended:
            self.lose(one)
        self._probe_at_s = self._now_s() + _PROBE_EVERY_S
        return bool(ended)

    def unreachable_for(self, deadline_s: float) -> list[int]:
        """Members that could not be reached for longer than this."""
        return [one for one, since_s in self._unreachable.items() if self._now_s() - since_s > deadline_s]

    def have_ended(self, workers: Sequence[int]) -> bool:
        """Whether these workers have ended, as far as they have ever been reached."""
        return all(self.incarnation(one) < 0 or self._has_ended(one, self.incarnation(one)) for one in workers)

    # Newcomers

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        """Takes newcomers, with their incarnations, into the next view; returns what they need for `enter`."""
        for worker, incarnation in newcomers.items():
            status = _Status.GONE if self._has_ended(worker, incarnation) else _Status.MEMBER
            self._standings[worker] = max(self._standings[worker], _Standing(incarnation, status))
        self.ids = tuple(sorted({*self.ids, *newcomers}))
        self._propose()
        return {"view": self.view, "members": self.ids, "standings": [tuple(map(int, one)) for one in self._standings]}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next view on, with what `let_in` returned to a member."""
        self.view, self.ids = given["view"], given["members"]
        self._standings = [_Standing(incarnation, _Status(status)) for incarnation, status in given["standings"]]
        self._propose()

    # Proposals

    def proposal(self, progress: Progress) -> torch.Tensor:
        """What this worker says about itself and all workers, (1 + 2 n,) int64."""
        self._told[self._worker_id] = progress
        return torch.tensor([progress.prepared, *chain.from_iterable(self._standings)])

    def hear(self, sender: int, view: int, round: int, x: torch.Tensor | None) -> bool:
        """Takes over what another worker's proposal says; returns whether this worker is still a member.

        Raises:
            ValueError: it is no proposal.
        """
        if x is None or x.dtype != torch.int64 or len(x) != 1 + 2 * len(self._workers):
            raise ValueError("no proposal")
        if view <= self.view:
            return True
        prepared, *told = x.tolist()
        standings = [_Standing(n, _Status(status)) for n, status in zip(told[::2], told[1::2], strict=True)]
        self._told[sender] = Progress(view, round, prepared)
        if standings[self._worker_id] > self._standings[self._worker_id]:
            return False
        self._standings = [max(one) for one in zip(standings, self._standings, strict=True)]
        self.proposed = max(self.proposed, view)
        return True

    def agreed(self) -> list[Progress] | None:
        """Begins the proposed view if all its living members have proposed it; returns how far each is, else None."""
        living = self.living
        if not all(one in self._told and self._told[one].view == self.proposed for one in living):
            return None
        self.view, self.ids = self.proposed, tuple(living)
        return [self._told[one] for one in living]
