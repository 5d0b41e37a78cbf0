"""How replacements of dead workers come into programs whose workers meet in rounds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch

from paceline.algorithms.round_messages import Reports
from paceline.errors import AlgorithmWarning, NotReplacedError, WorkerLostError
from paceline.ports.newcomers import STOPPED, Newcomers, Refusal
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.views import ElasticGroup

_COMPARED_ROUNDS = 10
_LOOK_EVERY_S = 0.05
_TOO_FEW = (
    "Only {left}, fewer than min_workers={least}, and no other replacement comes: allow more restarts or fewer workers. If a"
    " replacement could not join, the run's notes say why."
)
_TOO_FEW_WITHOUT_DEAL = (
    "Only {left}, fewer than min_workers={least}: dead workers can be replaced only if the loop uses worker.batches."
)
_WAITING = "Only {left}, fewer than min_workers={least}: waiting for replacements."


class Part(Protocol):
    """A part of a program, of which newcomers get a copy."""

    def for_newcomers(self) -> dict[str, Any]:
        """What a newcomer needs; all workers call it as the same step begins, and may wait for each other."""
        ...

    def enter(self, given: dict[str, Any]) -> None:
        """Goes on as the part of the worker that has `given` this."""


class Replacements:
    """Lets newcomers in, on all workers as the same step begins; on a newcomer, enters.

    The first worker says with a mean that it accepts newcomers, and names them in the exchange of reports that follows. If
    workers exchange models, it announces newcomers through `Views`. They take part from one of the next steps that begin with
    a batch, and have none in it. For ten means or rounds the others compare newcomers with themselves. If fewer than
    `Newcomers.min_workers` are left, they wait for newcomers before they begin a step.

    Costs: nothing while no newcomer waits; then one exchange, and the first worker's state, for which all wait.
    """

    def __init__(self, replica: Replica, ports: Ports[Any]) -> None:
        self._replica, self._ports = replica, ports
        self._group = ports.views or cast(ElasticGroup, ports.collectives)
        self.parts: list[Part] = []  # of the program, in the same order on all workers
        # The newcomers that this worker, if it is the first, has accepted; worker id: incarnation.
        self.accepted: dict[int, int] = {}
        # Number of members of the last round that the program has seen, and of the newcomers since.
        self.num_members = ports.num_workers
        self.incarnations: dict[int, int] = {}  # of all workers that replace others
        self._coming: dict[int, int] = {}  # let in before the next step
        self._compared: dict[int, int] = {}  # let in some steps ago
        self._compared_until = 0  # the round, if workers exchange models
        self._scales = False
        self._is_new = ports.incarnation > 0
        self._begun = 0  # rounds of batches, when the last step began

    def steps(self) -> Iterator[int]:
        try:
            for step in self._replica.steps():
                num_members = None
                if self._is_new:
                    num_members = self._enter()
                elif self._ports.views is not None and self._ports.newcomers is not None:
                    self._coming |= self._ports.views.coming(self._ports.shared.version)
                begun, port = self._replica.rounds_begun, self._ports.newcomers
                # A loop may make several steps with one batch.
                if port is not None and (self._replica.deal is None or begun > self._begun):
                    self._let_in_all(port, num_members)
                self._begun = begun
                yield step
                self._scales |= self._replica.scaled
        finally:
            self.parts.clear()  # which refer to this object: else they would be freed by a garbage collection only

    def announce(self) -> None:
        """Announces newcomers through `Views` if this worker is the first and accepts some."""
        if not self._coming and self.accept(has_closure=bool(self._replica.closure)):
            assert self._ports.views is not None
            self._ports.views.announce(self.accepted)

    def accept(self, *, has_closure: bool) -> dict[int, int]:
        """Accepts the newcomers that can enter, if this worker is the first; returns all that it has accepted."""
        port = self._ports.newcomers
        if port is None or self._ports.worker_id != self._group.members[0]:
            return {}
        deal = self._replica.deal
        self.accepted = port.accepted(deal.epoch if deal is not None else -1)
        if self.accepted and (why := self._why_not(has_closure)):
            port.refuse(self.accepted, why)
            self.accepted = {}
        return self.accepted

    def _why_not(self, has_closure: bool) -> Refusal | None:
        if self._replica.deal is None:
            return Refusal.OWN_BATCHES
        if self._scales:
            return Refusal.SCALED
        if has_closure:
            return Refusal.CLOSURES
        return None if self._replica.carries_all() else Refusal.SCHEDULES

    def hear(self, reports: Reports, *, compares: bool) -> None:
        """Notes who comes, and leaves out newcomers that do not make the same updates.

        Raises:
            NotReplacedError: this worker is one of them.
        """
        self._coming |= reports.accepted
        members = self._group.members if self._compared else ()
        others = [reports[one] for one in members if one not in self._compared]
        for one in [*self._compared] if others else ():  # else all who could differ from them have died
            if any(reports[one].is_like(other) for other in others):
                continue
            if one == self._ports.worker_id:
                raise NotReplacedError(Refusal.UNLIKE.why)
            del self._compared[one]
            reports[one] = reports[self._ports.worker_id]
        if not compares:
            self._compared = {}

    def leaves_out(self, worker: int, round: int) -> bool:
        """Whether another worker's model is left out, of a round for which it has other learning rates than this one.

        Raises:
            NotReplacedError: this worker is a newcomer, and the other one is not.
        """
        is_new = self._ports.worker_id in self._compared
        if round > self._compared_until or not (is_new or worker in self._compared):
            return False
        if worker not in self._compared:
            raise NotReplacedError(Refusal.UNLIKE.why)
        return True

    def _note(self, compared: dict[int, int]) -> None:
        self._compared |= compared
        self.incarnations |= compared
        self._compared_until = self._ports.shared.version + _COMPARED_ROUNDS
        self.num_members = len(self._group.members)

    def _let_in_all(self, port: Newcomers, num_members: int | None) -> None:
        """Lets in all that have been accepted, and waits for others until enough members are left.

        All members do so before the same step, newcomers as soon as they have entered.

        Raises:
            WorkerLostError: they are too few, and no newcomer comes.
        """
        deal = self._replica.deal
        if num_members is None:
            num_members = len(deal.members if deal is not None else self._group.members)
        while self._coming or num_members < port.min_workers:
            if num_members < port.min_workers and not self._wait_for_enough(port):
                return
            num_members = self._let_in()

    def _wait_for_enough(self, port: Newcomers) -> bool:
        """Waits until enough newcomers have been accepted; returns False if the run is being stopped."""
        clock, me, collectives = self._ports.clock, self._ports.worker_id, self._ports.collectives
        assert collectives is not None
        if self._replica.deal is None:
            raise WorkerLostError(_TOO_FEW_WITHOUT_DEAL.format(left=self._left(), least=port.min_workers))
        began_s, has_warned = clock.now_s(), False
        while True:
            look = torch.zeros(self._ports.num_workers + 2, dtype=torch.float64)
            if me == self._group.members[0]:
                for worker, incarnation in self.accept(has_closure=bool(self._replica.closure)).items():
                    look[worker] = incarnation
                look[-2], look[-1] = 1, port.expected(clock.now_s() - began_s)
            collectives.start_all_reduce(look).wait()
            *incarnations, has_looked, expected = map(int, look.tolist())
            self._coming = {worker: one for worker, one in enumerate(incarnations) if one}
            if has_looked and expected == STOPPED:
                return False
            num_members = len(self._group.members)
            if num_members + len(self._coming) >= port.min_workers:
                return True
            if has_looked and num_members + expected < port.min_workers:
                raise WorkerLostError(_TOO_FEW.format(left=self._left(), least=port.min_workers))
            if me == self._group.members[0]:
                if not has_warned:
                    has_warned = True
                    what = _WAITING.format(left=self._left(), least=port.min_workers)
                    warnings.warn(what, AlgorithmWarning, stacklevel=2)
                clock.sleep_s(_LOOK_EVERY_S)

    def _left(self) -> str:
        number = len(self._group.members)
        return f"{number} of {self._ports.num_workers} workers {'is' if number == 1 else 'are'} left"

    def _let_in(self) -> int:
        """From this step on newcomers take part, with what the first worker has; in it, they have no batch.

        Returns:
            how many members there are then.
        """
        port, replica, group = self._ports.newcomers, self._replica, self._group
        assert port is not None
        newcomers, self._coming, self.accepted = self._coming, {}, {}
        program = [part.for_newcomers() for part in self.parts]
        replica.meet(group.members, 0)  # deals batches of those that have died since the last mean
        first = group.members[0]
        is_first = self._ports.worker_id == first
        own = replica.for_newcomers() if is_first else {}
        port.let_in(newcomers, first)
        own["group"] = group.let_in(newcomers)
        for worker, incarnation in newcomers.items() if self._ports.views is not None else ():
            round = self._ports.shared.version
            self._ports.decided(round, peer=worker, at=round, of=round, peer_incarnation=incarnation)
        self._note(newcomers)
        own["deal"] = replica.let_in(group.members)
        if is_first:
            own |= {"giver": first, "program": program, "compared": self._compared, "incarnations": self.incarnations}
            port.give(newcomers, own)
        return len(group.living())  # the first worker's model must not change until they have it

    def _enter(self) -> int:
        """Begins a newcomer's first step; returns how many members there are.

        Raises:
            NotReplacedError: it has not come in, as it does where its loop asks for a batch.
        """
        given, self._replica.given = self._replica.given, None
        if given is None:
            raise NotReplacedError(Refusal.OWN_BATCHES.why)
        self._is_new = False
        for part, state in zip(self.parts, given["program"], strict=True):
            part.enter(state)
        self.incarnations = given["incarnations"]
        self._note(given["compared"])
        self.num_members = len(given["deal"]["members"])  # of whom this worker may know by now that some have died
        return len(self._group.living())
