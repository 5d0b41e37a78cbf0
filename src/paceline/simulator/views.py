"""Which workers of one simulated machine take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import WorkerLostError
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler


class SimulatedViews:
    """Implements `Views` for the worker whose program runs."""

    def __init__(self, scheduler: Scheduler, num_workers: int) -> None:
        self._scheduler, self._workers = scheduler, range(num_workers)
        self._rounds = [-1] * num_workers  # the last that each has begun
        self._begun = [0] * num_workers  # the first that each has not begun, or waits for at an epoch's end
        self._sent = [0] * num_workers
        self._first_without: dict[int, int] = {}  # by dead worker
        self._left: dict[int, str] = {}
        self._waiting: list[tuple[int, Program]] = []  # for all workers to begin so many rounds

    def begin(self, round: int) -> Sequence[int]:
        """As in `Views`."""
        self._rounds[self._scheduler.current.worker_id] = round
        self._tell(round + 1)
        if not self._first_without:
            return self._workers
        return tuple(one for one in self._workers if round < self._first_without.get(one, round + 1))

    def _tell(self, first_not_begun: int) -> None:
        self._scheduler.catch_up()
        worker = self._scheduler.current.worker_id
        self._begun[worker] = max(self._begun[worker], first_not_begun)
        self._wake()

    def sent(self, batches: int) -> None:
        """As in `Views`."""
        self._sent[self._scheduler.current.worker_id] = batches

    def kept(self, worker: int) -> int:
        """As in `Survivors`."""
        return self._sent[worker]

    def has_died(self, worker: int) -> bool:
        """As in `Views`."""
        return worker in self._first_without

    def living(self) -> Sequence[int]:
        """As in `Survivors`."""
        number = self._rounds[self._scheduler.current.worker_id] + 2
        self._tell(number)
        while not self._have_come(number):
            self._waiting.append((number, self._scheduler.current))
            self._scheduler.wait("the others at the epoch's end")
        missing = [one for one in self._left if self._begun[one] < number]
        if missing:
            raise WorkerLostError(
                f"Worker {missing[0]} has left the run ({self._left[missing[0]]}); the others wait for it."
            )
        return tuple(one for one in self._workers if self._begun[one] >= number)

    def _have_come(self, number: int) -> bool:
        gone = self._first_without.keys() | self._left.keys()
        return all(begun >= number or one in gone for one, begun in enumerate(self._begun))

    def _wake(self) -> None:
        ready = [one for one in self._waiting if self._have_come(one[0])]
        for one in ready:
            self._waiting.remove(one)
            self._scheduler.wake(one[1])

    def lose(self, worker: int, reason: str, *, is_dead: bool = False) -> None:
        """A worker takes part in no further round; the others go on without it if it `is_dead`."""
        if is_dead:
            self._first_without.setdefault(worker, max(self._begun))
        else:
            self._left[worker] = reason
        self._wake()
