"""Assigns an epoch's batches to workers in rounds, and again if a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.ports.round_shares import RoundShares
from paceline.ports.views import Survivors


class Left(NamedTuple):
    """Numbers of the batches that remain in a run: all from `first` on, and these earlier ones.

    `sizes`: changes of `RoundShares`, which determine the samples of these batches.
    """

    first: int
    earlier: list[int]
    sizes: Sequence[list[int]] = ()

    @property
    def least(self) -> int:
        return min([self.first, *self.earlier])


ALL_LEFT = Left(0, [])


class RoundDeal:
    """Deals an epoch's batches in rounds: each round gives the next batches to the members in order of id.

    Every worker computes the whole deal itself, from facts that all workers know: who took part in each mean. If a member
    dies, the others first deal again the batches whose gradients are in no mean, including those of earlier epochs, whose
    places are negative.

    Attributes:
        members: workers that get batches, in order of id.
        begun: number of rounds whose steps have begun; a loop that prefetches gets a batch before its step begins.
        met: number of rounds whose gradients are in a mean.
        earlier: data that a loader needs for batches of earlier epochs that are in no mean yet, by place.
    """

    def __init__(
        self,
        worker_id: int,
        num_workers: int,  # number of members at first
        left: Left = ALL_LEFT,  # the batches that remain in the run; a resumed run begins in the middle of an epoch
        *,
        tracks: bool = True,  # whether `meet` is called for every mean, as it is if workers continue without others
        # Tells which workers are alive at the end of an epoch, and what the others completed; None: every step of an
        # epoch gets its mean within the epoch.
        survivors: Survivors | None = None,
        shares: RoundShares | None = None,  # sizes of the batches, if they follow the workers' speeds
    ) -> None:
        self.members: Sequence[int] = range(num_workers)
        self.begun = self.met = self.epoch = 0
        self._worker_id, self._tracks, self._survivors, self._shares = worker_id, tracks, survivors, shares
        if shares is not None:
            shares.take_over(left.sizes)
        self._unmet: dict[int, dict[int, int]] = {}  # by round of an earlier deal in no mean yet: members' places
        self._handed = self.first_round = 0
        self._left_before = left
        self._first = self._numbers = 0  # the epoch's first batch, and how many it has
        self._again: list[int] = []  # places that come before all others
        self._late: list[int] = []  # those of a dead worker that the epoch before has no round for
        self._place = 0
        self._can_repeat = True
        self._is_settled = False
        self.earlier: dict[int, Any] = {}

    def begin(self, round: int, epoch: int, numbers: int, *, can_repeat: bool = True) -> None:
        """Begins an epoch of at most `numbers` batches with this round; `can_repeat`: batches can be fetched again."""
        shift, self._first = epoch * numbers - self._first, epoch * numbers
        for places in self._unmet.values():
            places.update((worker, place - shift) for worker, place in places.items())
        late, self._late = [place - shift for place in self._late], []
        self.begun = self.met = self._handed = self.first_round = round
        self.epoch, self._numbers, self._can_repeat, self._is_settled = epoch, numbers, can_repeat, False
        self._place = max(0, self._left_before.first - self._first)
        left_before = [one - self._first for one in self._left_before.earlier if one // numbers == epoch]
        self._again = sorted([*late, *left_before])

    def places(self, round: int) -> list[int]:
        """The places of the members' batches in a round, in order of id; places past the epoch's end have no batch."""
        first = (round - self.first_round) * len(self.members)
        if first < 0:  # dealt before the members changed
            return list(self._unmet[round].values())
        return [self._at(number) for number in range(first, first + len(self.members))]

    def is_over(self, round: int, has: Callable[[int], bool]) -> bool:
        """Whether the epoch ends before a round, because its first member has no batch; `has(place)`: the place has one.

        A newcomer's first round exists even if only a dead worker had a batch in it, because the others have begun it.
        """
        number = (round - self.first_round) * len(self.members)
        return number >= 0 and not has(self._at(number))

    def place(self, round: int) -> int:
        """The place of this worker's batch in a round; places past the epoch's end have no batch."""
        if round < self.first_round:
            return self._unmet[round].get(self._worker_id, self._numbers)
        return self._at((round - self.first_round) * len(self.members) + self.members.index(self._worker_id))

    @property
    def first_place(self) -> int:
        """The place from which the members take turns."""
        return self._place - len(self._again)

    def claim(self, round: int) -> None:
        """Records that this worker has claimed its batches of all rounds before this one."""
        if self._shares is not None:
            self._shares.claim(self.epoch, self._numbers, self._following(round)[0])

    def hand_out(self, round: int) -> None:
        if round >= self._handed:
            self._handed, self._is_settled = round + 1, False

    def unmet(self, has: Callable[[int], bool]) -> list[int]:
        """The places of this epoch's batches that are in no mean yet; call it before the next epoch begins.

        If a worker dies in the last step of a loop that prefetches, the next epoch begins with its batch.
        """
        self._note_unmet()
        if not self._can_repeat:
            self._unmet.clear()
        for places in self._unmet.values():
            for worker in [one for one, place in places.items() if not has(place)]:
                del places[worker]
        following, again = self._following(self._handed)
        again = [place for place in again if has(place)]
        self._late = [] if again and has(following) else again  # a loop that leaves an epoch also leaves these batches
        return [*self._late, *(place for places in self._unmet.values() for place in places.values())]

    def settle(self) -> None:
        """At the epoch's end: if batches are in no mean yet, waits for the others and deals those of dead workers."""
        if self._survivors is not None and not self._is_settled and (self._unmet or self.met < self._handed):
            self._is_settled = True  # also for a newcomer that prefetches and so comes here later
            members = self._survivors.living()
            self.meet(members, rounds=min(map(self._survivors.kept, members)))

    def _note_unmet(self) -> None:
        """Records the places of rounds that are in no mean, before the deal changes."""
        for round in range(max(self.met, self.first_round), self._handed) if self._tracks else ():
            self._unmet[round] = dict(zip(self.members, self.places(round), strict=True))

    def _at(self, number: int) -> int:
        again = self._again
        return again[number] if number < len(again) else self._place + number - len(again)

    def meet(self, members: Sequence[int], rounds: int | None = None) -> None:
        """Records that a mean contains these members' gradients of the first `rounds`; None: of all that have begun."""
        if len(members) < len(self.members):
            self._go_on_with(members)
        contained = self.begun if rounds is None else rounds
        self.met = max(self.met, contained)
        self._unmet = {round: places for round, places in self._unmet.items() if round >= contained}

    def _go_on_with(self, members: Sequence[int]) -> None:
        """Deals the rounds that the loop has not received among other members."""
        self._note_unmet()
        kept = self._survivors.kept if self._survivors is not None else lambda worker: 0
        dead = {worker: kept(worker) for worker in self.members if worker not in members}
        again = [
            places.pop(worker)
            for round, places in self._unmet.items()
            for worker, first_lost in dead.items()
            if worker in places and round >= first_lost
        ]
        self._place, rest = self._following(self._handed)
        again = sorted([*again, *rest]) if self._can_repeat else []
        self.members, self.first_round, self._again = members, self._handed, again

    def _following(self, round: int) -> tuple[int, list[int]]:
        """The first place that no earlier round has, and the places to deal before it."""
        dealt = max(0, (round - self.first_round) * len(self.members))
        return self._place + max(0, dealt - len(self._again)), self._again[dealt:]

    def let_in(self, members: Sequence[int]) -> dict[str, Any]:
        """Includes new members in later rounds; returns the state that a newcomer needs."""
        self._go_on_with(members)
        own = ("_worker_id", "_survivors", "_shares", "_left_before")
        sizes = self._shares.changes() if self._shares is not None else []
        return {"sizes": sizes} | {name: value for name, value in vars(self).items() if name not in own}

    def enter(self, given: dict[str, Any]) -> None:
        if self._shares is not None:
            self._shares.take_over(given["sizes"])
        vars(self).update((name, value) for name, value in given.items() if name != "sizes")

    def left(self, round: int, unstepped: Sequence[int] = ()) -> Left | None:
        """The batches that remain if the run ends before this round, or with `unstepped` numbers of earlier epochs.

        None: unknown, because the members have changed since, for example in a step over several batches.
        """
        if not self._numbers:
            return self._left_before
        if round < min(self.first_round, self.met):
            return None
        rounds = range(round, self.first_round)
        place, again = self._following(round)
        earlier = sorted([*(one for number in rounds for one in self._unmet.get(number, {}).values()), *again])
        earlier = sorted({*unstepped, *(self._first + one for one in earlier if one < self._numbers)})
        left = Left(self._first + min(place, self._numbers), earlier)
        if self._shares is None:
            return left
        epoch, place = divmod(left.least, self._numbers)
        return left._replace(sizes=self._shares.changes(self._shares.round_of(epoch, self._numbers, place)))
