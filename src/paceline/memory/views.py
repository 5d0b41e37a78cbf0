"""Which workers take part in a round, in shared memory: the supervisor says who has died."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.errors import WorkerLostError
from paceline.memory.atomics import fetch_add, load, store
from paceline.memory.failpoints import fail_point
from paceline.memory.segment import Layout, Segment
from paceline.memory.segment_part import PartPlan, SegmentPart
from paceline.memory.waiting import raise_if_stopped, wait_briefly, wake_all

_UNDECIDED, _HAS_LEFT = -1, -2
_NEWS_S = 10.0  # the supervisor hears of a death within milliseconds, unless it does not get a core


class SharedViews(SegmentPart[PartPlan]):
    """Implements `Views` in shared memory.

    A worker that begins round k first writes k + 1 to its word, the first round that it has not begun, and then looks for
    deaths. The supervisor first marks the dead worker as undecided, and then reads these words: the largest is the first round
    without the dead worker. So either the supervisor sees that a worker has begun a round, or that worker sees the mark and
    waits for the number.

    Costs: a write and a read of shared memory per round; after a death, a read per worker.
    """

    def __init__(
        self, segment: Segment, plan: PartPlan, participant_id: int, incarnation: int = 0, abort_address: int = 0
    ) -> None:
        super().__init__(segment, plan, participant_id, incarnation, abort_address)
        self._worker_id, self._workers = participant_id, range(plan.num_participants)
        self._news, self._begun = self._word("news"), self._word("begun", participant_id)
        self._round = -1  # the last one that this worker has begun

    @staticmethod
    def areas(layout: Layout, plan: PartPlan) -> dict[str, int]:
        """A counter of deaths and departures, and three words for each worker."""
        words = {name: layout.words(f"views.{name}", plan.num_participants) for name in ("begun", "sent", "lost")}
        # "lost", of a dead worker: the first round without it, plus 1.
        return {**words, "news": layout.words("views.news", 1)}

    def begin(self, round: int) -> Sequence[int]:
        """As in `Views`."""
        self._round = round
        self._tell(round + 1)  # no worker sleeps until others begin: at an epoch's end, all come to `living`
        fail_point("views.begun")
        if not load(self._news):
            return self._workers
        return tuple(one for one in self._workers if round < self._first_without(one))

    def _tell(self, first_not_begun: int) -> None:
        store(self._begun, max(load(self._begun), first_not_begun))

    def _first_without(self, worker: int) -> float:
        word = self._word("lost", worker)
        while (first := load(word)) == _UNDECIDED:
            raise_if_stopped(self._abort)
            wait_briefly(word, first)
        return first - 1 if first > 0 else float("inf")

    def sent(self, batches: int) -> None:
        """As in `Views`."""
        store(self._word("sent", self._worker_id), batches)

    def kept(self, worker: int) -> int:
        """As in `Survivors`."""
        return load(self._word("sent", worker))

    def has_died(self, worker: int) -> bool:
        """As in `Views`."""
        word, until_s = self._word("lost", worker), time.monotonic() + _NEWS_S
        while (lost := load(word)) in (0, _UNDECIDED) and time.monotonic() < until_s:
            raise_if_stopped(self._abort)
            wait_briefly(word, lost)
        return lost > 0

    def living(self) -> Sequence[int]:
        """As in `Survivors`."""
        number = self._round + 2
        self._tell(number)
        wake_all(self._begun)
        return tuple(one for one in self._workers if self._comes(one, number))

    def _comes(self, worker: int, number: int) -> bool:
        word, lost = self._word("begun", worker), self._word("lost", worker)
        while (begun := load(word)) < number:
            how = load(lost)
            if how and load(word) < number:
                if how == _HAS_LEFT:
                    raise_if_stopped(self._abort)
                    raise WorkerLostError(f"Worker {worker} has left the run, and the others wait for it.")
                return False
            raise_if_stopped(self._abort)
            wait_briefly(word, begun)
        return True

    # The supervisor

    def lose(self, worker: int, *, is_dead: bool) -> None:
        """A worker takes part in no further round.

        Args:
            worker: which.
            is_dead: its process has ended: the others go on without it.
        """
        word = self._word("lost", worker)
        if load(word):
            return
        store(word, _UNDECIDED if is_dead else _HAS_LEFT)
        fetch_add(self._news, 1)
        if is_dead:
            store(word, max(load(self._word("begun", one)) for one in self._workers) + 1)
        for one in (word, self._word("begun", worker)):
            wake_all(one)
