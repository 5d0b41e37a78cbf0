"""Which workers take part in rounds of messages, as far as one of them knows, and what it knows about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import torch

from paceline.transport.ends import EndDetector
from paceline.transport.quorum import Quorum

_PROBE_EVERY_S = 0.1  # how often a wait checks whether an unreachable worker has ended
_LOOK_AGAIN_FOR = 0.25  # of the deadline: the least time between noticing an absence and excluding the worker


class Status(IntEnum):
    """Whether a worker takes part."""

    MEMBER = 0
    EXCLUDED = 1  # could not be reached for too long; it may be alive
    GONE = 2  # has died, or has left the run in order
    FAILED = 3  # its program has ended early


class _Standing(NamedTuple):
    """What is known about a worker; newer knowledge compares greater."""

    incarnation: int = 0
    status: Status = Status.MEMBER


class _Absence(NamedTuple):
    """The times between which a member became unreachable."""

    heard_s: float  # when it was last known to be reachable
    noticed_s: float


class Progress(NamedTuple):
    """How far a worker is when it proposes a view."""

    view: int  # the number of the proposed view
    round: int  # the last one that it has begun
    prepared: int  # the view in which it has this round's result; -1: none


class RoundMembers:
    """The numbered view of one worker: the members of the next round, or of its repetition.

    A worker proposes the next view whenever its knowledge changes: a member has died, left or failed, a connection was
    restored, or newcomers come in. A proposal says all that it knows, and how far it is. The view begins once all living
    members have proposed the same number with the same members: a worker may have proposed it before it heard that another
    one excludes a third, and need not agree.

    A worker is gone if it says so, or if its connection has ended and its machine says that no process listens at its
    address. A silent worker is excluded after a deadline. It may be alive, so a view without it needs a `Quorum`.

    Attributes:
        proposed: the number that this worker has proposed last.
    """

    def __init__(
        self,
        worker_id: int,
        num_workers: int,  # of the run; all are members at first
        ends: EndDetector,
        incarnations: Sequence[int],
        deadline_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._worker_id, self._workers, self._ends = worker_id, range(num_workers), ends
        self._deadline_s, self._now_s = deadline_s, now_s
        self.ids: Sequence[int] = tuple(self._workers)
        self._quorum = Quorum([self.ids])
        self.view = self.proposed = 0
        self._standings = [_Standing(one) for one in incarnations or [0] * num_workers]
        self._told: dict[int, Progress] = {}  # what each worker has said last
        self._told_living: dict[int, list[int]] = {}  # the members that are alive by what it has said
        self._unreachable: dict[tuple[int, int], _Absence] = {}  # by worker and incarnation
        self._probe_at_s = -math.inf

    @property
    def others(self) -> list[int]:
        return [one for one in self.ids if one != self._worker_id]

    @property
    def changes(self) -> bool:
        return self.proposed > self.view

    @property
    def failed(self) -> list[int]:
        return [one for one in self._workers if self._standings[one].status is Status.FAILED]

    @property
    def living(self) -> list[int]:
        return [one for one in self.ids if self._is_member(one)]

    @property
    def listeners(self) -> list[int]:
        """Other members of the present view that may be alive: excluded ones must hear of it."""
        return [one for one in self.others if self._may_live(one)]

    def is_excluded(self, worker: int, incarnation: int) -> bool:
        """Whether a worker takes no part any more, although it may be alive."""
        return self._standings[worker] == (incarnation, Status.EXCLUDED)

    def incarnation(self, worker: int) -> int:
        """The newest incarnation of a worker that is or was a member."""
        return self._standings[worker].incarnation

    def _is_member(self, worker: int, incarnation: int | None = None) -> bool:
        standing = self._standings[worker]
        return standing.status is Status.MEMBER and incarnation in (None, standing.incarnation)

    def _may_live(self, worker: int) -> bool:
        return self._standings[worker].status <= Status.EXCLUDED

    @property
    def _alive(self) -> list[int]:
        return [one for one in self._workers if self._may_live(one)]

    def _propose(self) -> None:
        self.proposed = max(self.proposed, self.view) + 1

    # What this worker finds out

    def lose(self, workers: Mapping[int, Status]) -> None:
        """Members take part in no further round."""
        for worker, status in workers.items():
            if self._is_member(worker):
                self._standings[worker] = self._standings[worker]._replace(status=status)
                self._propose()

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker says that it takes part in no further round; it may not have been let in yet."""
        is_excluded = self._standings[worker].status is Status.EXCLUDED  # so it may have gone on without this worker
        status = Status.EXCLUDED if is_excluded else Status.GONE
        self.lose({worker: status})
        self._standings[worker] = max(self._standings[worker], _Standing(incarnation, status))

    def disconnect(self, worker: int, incarnation: int, *, has_ended: bool) -> None:
        """A worker's connection has ended; `has_ended`: its program has, and without leaving the rounds first."""
        if self._is_member(worker, incarnation):
            if has_ended:
                self.lose({worker: Status.FAILED})
            else:
                self.miss(worker)

    def restore(self, worker: int, incarnation: int) -> None:
        """A member can be reached again. What was on its way is lost, so all say again what they have to say."""
        if self._is_member(worker, incarnation):
            self._unreachable.pop((worker, incarnation), None)
            self._propose()

    def call(self) -> None:
        """Calls all members of the next view to a meeting."""
        self._propose()

    def miss(self, worker: int) -> None:
        absence = worker, self.incarnation(worker)
        if absence not in self._unreachable and self._is_member(worker):
            self._unreachable[absence] = _Absence(self._ends.heard_s(worker), self._now_s())
            self._probe_at_s = -math.inf

    def absent(self) -> dict[int, Status]:
        """Unreachable members whose processes have ended, or that are to be excluded; empty if it has just been asked."""
        # Another member may have excluded one first, whose successor is a member by now.
        self._unreachable = {one: absence for one, absence in self._unreachable.items() if self._is_member(*one)}
        if not self._unreachable or self._now_s() < self._probe_at_s:
            return {}
        self._probe_at_s = self._now_s() + _PROBE_EVERY_S
        ended = {worker for worker, incarnation in self._unreachable if self._ends.has_ended(worker, incarnation)}
        silent = {worker for (worker, _), absence in self._unreachable.items() if self._is_overdue(absence)} - ended
        return dict.fromkeys(ended, Status.GONE) | dict.fromkeys(silent, Status.EXCLUDED)

    def _is_overdue(self, absence: _Absence) -> bool:
        """Whether to exclude a member. After a long computation or a pause, a worker first waits a while."""
        since_s = max(absence.heard_s, absence.noticed_s - (1 - _LOOK_AGAIN_FOR) * self._deadline_s)
        return self._now_s() - since_s > self._deadline_s

    def have_ended(self, workers: Sequence[int]) -> bool:
        """Whether these workers have ended, as far as they have ever been reached."""
        return all(self.incarnation(one) < 0 or self._ends.has_ended(one, self.incarnation(one)) for one in workers)

    # Newcomers

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        """Takes newcomers, with their incarnations, into the next view; returns what they need for `enter`."""
        for worker, incarnation in newcomers.items():
            status = Status.GONE if self._ends.has_ended(worker, incarnation) else Status.MEMBER
            self._standings[worker] = max(self._standings[worker], _Standing(incarnation, status))
        self.ids = tuple(sorted({*self.ids, *newcomers}))
        self._propose()
        standings = [tuple(map(int, one)) for one in self._standings]
        return {"view": self.view, "members": self.ids, "standings": standings, "quorum": self._quorum.views}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next view on, with what `let_in` returned to a member."""
        self.view, self.ids, self._quorum = given["view"], given["members"], Quorum(given["quorum"])
        self._standings = [_Standing(incarnation, Status(status)) for incarnation, status in given["standings"]]
        self._propose()

    # Proposals

    @property
    def knowledge(self) -> tuple[tuple[int, int], ...]:
        """What a proposal says about all workers."""
        return tuple(self._standings)

    def proposal(self, progress: Progress) -> torch.Tensor:
        """What this worker says about itself and all workers, (1 + 2 n,) int64."""
        return torch.tensor([progress.prepared, *chain.from_iterable(self._standings)])

    def hear(self, sender: int, incarnation: int, view: int, round: int, x: torch.Tensor | None) -> bool:
        """Takes over what another worker's proposal says; returns whether this worker is still a member.

        A worker that another one excludes goes on without it if it has a quorum, and the other one has none.

        Raises:
            ValueError: it is no proposal.
        """
        if x is None or x.dtype != torch.int64 or len(x) != 1 + 2 * len(self._workers):
            raise ValueError("no proposal")
        if view <= self.view or self.is_excluded(sender, incarnation):
            return True
        prepared, *told = x.tolist()
        standings = [_Standing(n, Status(status)) for n, status in zip(told[::2], told[1::2], strict=True)]
        if standings[self._worker_id] > self._standings[self._worker_id]:
            return self._remains_without(sender, standings)
        if self._is_accused_wrongly(standings, sender):
            self.lose({sender: Status.EXCLUDED})
            return True
        self._told[sender] = Progress(view, round, prepared)
        self._told_living[sender] = [one for one in self.ids if standings[one].status is Status.MEMBER]
        self._standings = [max(one) for one in zip(standings, self._standings, strict=True)]
        self.proposed = max(self.proposed, view)
        return True

    def _remains_without(self, accuser: int, standings: Sequence[_Standing]) -> bool:
        """Whether this worker has a quorum without one that excludes it, and that one has none.

        The accuser's quorum counts the deaths that it knows of. This worker's does not: the dead ones may have gone on with
        the accuser before.
        """
        members = [one for one in self._workers if standings[one].status is Status.MEMBER]
        known = map(max, standings, self._standings)
        alive = [worker for worker, standing in enumerate(known) if standing.status <= Status.EXCLUDED]
        if not self._quorum.missing(members, alive):
            return False
        self.lose({accuser: Status.EXCLUDED})
        return not self.missing()

    def _is_accused_wrongly(self, standings: Sequence[_Standing], accuser: int) -> bool:
        """Whether a member before the accuser has excluded one that this worker still reaches.

        Of two members that cannot reach each other, the one with the lower id stays.
        """
        return any(
            standings[one].status is Status.EXCLUDED
            and self._is_member(one, standings[one].incarnation)
            and (one, standings[one].incarnation) not in self._unreachable
            for one in self.others
            if one < accuser
        )

    def is_agreed(self, own: Progress) -> bool:
        """Whether all living members have proposed the same view, as this worker has."""
        living = self.living
        self._told[self._worker_id], self._told_living[self._worker_id] = own, living
        return all(
            one in self._told and (self._told[one].view, self._told_living[one]) == (self.proposed, living)
            for one in living
        )

    def missing(self) -> list[int]:
        """The excluded workers without which the living members must not go on; empty if these have a quorum."""
        return self._quorum.missing(self.living, self._alive)

    def begin(self) -> list[Progress]:
        """Begins the view that is agreed on; returns how far its members are."""
        self.view, self.ids = self.proposed, tuple(self.living)
        self._quorum.begin(self.ids)
        return [self._told[one] for one in self.ids]

    def note_begun(self) -> None:
        self._quorum.has_begun(self.ids)
