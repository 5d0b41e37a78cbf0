"""Which workers take part in a round, in shared memory: the supervisor says who has died."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import WorkerLostError
from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import Layout
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.waiting import raise_if_stopped, wait_briefly, wake

_UNDECIDED = -1
_NEWS_S = 10.0  # the supervisor hears of a death within milliseconds, unless it does not get a core


class SharedViews(SegmentPart[PartPlan]):
    """Implements `Views` in shared memory.

    A worker that begins round k first writes k + 1 to its word, the first round that it has not begun, and then looks for
    deaths. The supervisor first marks the dead worker as undecided, and then reads these words: the largest is the first round
    without the dead worker. So either the supervisor sees that a worker has begun a round, or that worker sees the mark and
    waits for the number.

    Newcomers are announced in the same way. The first member names them, marks the round in which they come as undecided, and
    then reads these words: the round after the largest is the one. All workers look before they begin that round, because they
    have written the word of the round before. Any of them can decide, so none waits if the first member dies meanwhile.

    Costs: a write and two reads of shared memory per round; after a death, a read per worker.
    """

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        self._worker_id, self._workers = self._participant, range(self._plan.num_participants)
        self._news, self._begun = self._word("news"), self._word("begun", self._worker_id)
        self._comes = self._word("comes")
        # Of the round that this worker has begun last; after `living`, those that it has returned.
        self.members: Sequence[int] = self._workers
        self._incarnations = [0] * len(self._workers)
        self._round = -1  # the last one that this worker has begun
        self._last_came = 0  # the round in which the last newcomers were to come

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        """Words of each worker, a counter of deaths and departures, and the round in which newcomers come."""
        # "losses": of its last incarnation i that has left the run, 2 i + 1, or has died, 2 i + 2. "lost": the first round
        # without a dead member, plus 1. "entered": the incarnation that is a member. "named": the one that is to come.
        names = ("begun", "sent", "losses", "lost", "entered", "named")
        words = {name: layout.words(f"views.{name}", plan.num_participants) for name in names}
        return {**words, "news": layout.words("views.news", 1), "comes": layout.words("views.comes", 1)}

    def begin(self, round: int) -> Sequence[int]:
        self._round = round
        self._tell(round + 1)  # no worker sleeps until others begin: at an epoch's end, all come to `living`
        fail_point("views.begun")
        if load(self._news):
            self.members = tuple(one for one in self.members if round < self._first_without(one))
        return self.members

    def _tell(self, first_not_begun: int) -> None:
        store(self._begun, max(load(self._begun), first_not_begun))

    def _newest(self) -> int:
        """The first round that no worker has begun."""
        return max(load(self._word("begun", one)) for one in self._workers)

    def _first_without(self, worker: int) -> float:
        word = self._word("lost", worker)
        while (first := load(word)) == _UNDECIDED:
            raise_if_stopped(self._abort)
            wait_briefly(word, first)
        return first - 1 if first > 0 else float("inf")

    def sent(self, batches: int) -> None:
        store(self._word("sent", self._worker_id), batches)

    def got(self, worker: int, batches: int) -> None:
        """As in `Views`; call it before `living`, for which that worker waits."""
        store(self._word("sent", worker), batches)

    def kept(self, worker: int) -> int:
        return load(self._word("sent", worker))

    def has_died(self, worker: int) -> bool:
        word, died, until_s = self._word("losses", worker), self._death(worker), time.monotonic() + _NEWS_S
        while (loss := load(word)) < died - 1 and time.monotonic() < until_s:
            raise_if_stopped(self._abort)
            wait_briefly(word, loss)
        return loss >= died

    def _death(self, worker: int) -> int:
        """What the word "losses" says at least once the worker's present incarnation has died; 1 less if it has left."""
        return 2 * self._incarnations[worker] + 2

    def living(self) -> Sequence[int]:
        number = self._round + 2
        self._tell(number)
        wake(self._begun)
        self.members = tuple(one for one in self.members if self._comes_to(one, number))
        return self.members

    def _comes_to(self, worker: int, number: int) -> bool:
        word, losses, died = self._word("begun", worker), self._word("losses", worker), self._death(worker)
        while (begun := load(word)) < number:
            loss = load(losses)
            if loss >= died - 1 and load(word) < number:
                if loss < died:
                    raise_if_stopped(self._abort)
                    raise WorkerLostError(f"Worker {worker} has left the run, and the others wait for it.")
                return False
            raise_if_stopped(self._abort)
            wait_briefly(word, begun)
        return True

    def place(self) -> int:
        return self._round

    def end_of(self, worker: int) -> dict[str, int]:
        """For replays, how far a dead worker was: the rounds that it had begun, those with it, its batches that are kept."""
        begun, sent, lost = (load(self._word(name, worker)) for name in ("begun", "sent", "lost"))
        first_without = lost - 1 if lost else self._newest()  # a worker that has left before it dies is in all rounds
        return {"left_at": begun, "first_without": first_without, "kept": sent}

    # Newcomers

    def announce(self, newcomers: Mapping[int, int]) -> None:
        if self._decided() > self._last_came:
            return
        for worker in self._workers:
            store(self._word("named", worker), newcomers.get(worker, 0))
        store(self._comes, _UNDECIDED)
        self._decided()

    def _decided(self) -> int:
        """The round before which the newcomers that were announced last come."""
        if load(self._comes) == _UNDECIDED:
            compare_and_swap(self._comes, _UNDECIDED, self._newest() + 1)
        return load(self._comes)

    def coming(self, round: int) -> Mapping[int, int]:
        if not self._last_came < (first := self._decided()) <= round:
            return {}
        self._last_came = first
        named = ((worker, load(self._word("named", worker))) for worker in self._workers)
        return {worker: incarnation for worker, incarnation in named if incarnation}

    def let_in(self, newcomers: Mapping[int, int]) -> dict[str, Any]:
        """As in `ElasticGroup`; call `living` before and after it.

        No worker looks at the words of the newcomers' predecessors in between, so newcomers can take them over.
        """
        self.members = tuple(sorted({*self.members, *newcomers}))
        for worker, incarnation in newcomers.items():
            self._incarnations[worker] = incarnation
        names = ("members", "_incarnations", "_round", "_last_came")
        return {name: getattr(self, name) for name in names}

    def enter(self, given: dict[str, Any]) -> None:
        """Takes part from the next `living` on, with what `let_in` returned to a member."""
        vars(self).update(given)
        store(self._word("lost", self._worker_id), 0)
        store(self._word("entered", self._worker_id), self._incarnation)

    def is_dead(self, worker: int, incarnation: int) -> bool:
        return load(self._word("losses", worker)) > 2 * incarnation + 1

    # The supervisor

    def mark_lost(self, worker: int, incarnation: int = 0, *, is_dead: bool = False) -> None:
        """A worker takes part in no further round; the others go on without it if it `is_dead`, as its process has ended."""
        losses, lost, left = self._word("losses", worker), self._word("lost", worker), 2 * incarnation + 1
        if load(losses) >= left:
            return
        was_member = is_dead and load(self._word("entered", worker)) == incarnation
        if was_member:
            store(lost, _UNDECIDED)
        store(losses, left + is_dead)
        fetch_add(self._news, 1)
        if was_member:
            store(lost, self._newest() + 1)
        for one in (losses, lost, self._word("begun", worker)):
            wake(one)
