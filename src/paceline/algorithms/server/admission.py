"""Whose gradients become an update, and when: in sync with backup workers, asynchronously, or with bounded clocks.

An admission is one shard's. It holds no vector and knows no message: the shard tells it who takes part, what has arrived and
what it has applied, and asks. So it runs alike in a server, in the simulator and in a test of 100,000 updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from paceline.algorithms.server.backups import BackupController
from paceline.algorithms.server.update import UpdateInfo

__all__ = ["Admission", "Async", "AutoSync", "Bounded", "Follower", "Sync", "Verdict"]


class Verdict(Enum):
    """What becomes of a gradient that has arrived."""

    APPLY = "apply"  # now, by itself
    HOLD = "hold"  # until `complete` names its worker
    DROP = "drop"


class Admission(Protocol):
    """Decides for one shard."""

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker takes part from now on, with its update after `sequence`; what it brought before is forgotten."""
        ...

    def leave(self, worker_id: int) -> None:
        """A worker takes part no more: it has no more data, or it is dead. What it brought still counts."""
        ...

    def admit(self, update: UpdateInfo) -> Verdict:
        """What becomes of an update."""
        ...

    def complete(self) -> tuple[int, ...]:
        """The workers whose held gradients make one update now, in the order of their ids; () as long as none is due."""
        ...

    def applied(self, update: UpdateInfo) -> None:
        """An update was applied; `update.worker_id` is the lowest of those that made it."""
        ...

    def may_read(self, worker_id: int) -> bool:
        """Whether a worker may have parameters for its next gradient."""
        ...


class Async:
    """Every gradient is applied as it arrives, and nobody waits."""

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """Anyone may, at any time."""

    def leave(self, worker_id: int) -> None:
        """Nobody is waited for."""

    def admit(self, update: UpdateInfo) -> Verdict:
        """Always."""
        return Verdict.APPLY

    def complete(self) -> tuple[int, ...]:
        """Nothing is held."""
        return ()

    def applied(self, update: UpdateInfo) -> None:
        """Nothing follows."""

    def may_read(self, worker_id: int) -> bool:
        """Always."""
        return True


class Bounded:
    """Stale synchronous parallel: no worker begins a step while it is more than `clock_bound` steps ahead of the slowest.

    A worker's clock is the number of its updates. It bounds clocks, not versions: between two updates of the slowest worker
    each of the n - 1 others may apply up to 2 s + 1, so the staleness in versions is larger, up to (2 s + 1)(n - 1).
    A worker that joins late begins at the slowest clock; one that leaves is not waited for.

    Args:
        clock_bound: s, from 0, which is as good as a barrier.
        workers: those that take part from the beginning.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    def __init__(self, clock_bound: int, workers: Iterable[int]) -> None:
        self._bound = clock_bound
        self.clocks = dict.fromkeys(workers, 0)
        self.bases = dict(self.clocks)  # where each worker's clock stood before its first update

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker joins at the slowest clock of the others."""
        others = [clock for worker, clock in self.clocks.items() if worker != worker_id]
        self.clocks[worker_id] = min(others, default=0)
        self.bases[worker_id] = self.clocks[worker_id] - sequence

    def leave(self, worker_id: int) -> None:
        """The others no longer wait for it."""
        self.clocks.pop(worker_id, None)

    def admit(self, update: UpdateInfo) -> Verdict:
        """Always: what is bounded is who may read."""
        return Verdict.APPLY

    def complete(self) -> tuple[int, ...]:
        """Nothing is held."""
        return ()

    def applied(self, update: UpdateInfo) -> None:
        """The worker's clock ticks."""
        if update.worker_id in self.clocks:
            self.clocks[update.worker_id] = self.bases[update.worker_id] + update.sequence

    def may_read(self, worker_id: int) -> bool:
        """Whether the worker is at most `clock_bound` ahead of the slowest."""
        if worker_id not in self.clocks:
            return True
        return self.clocks[worker_id] - min(self.clocks.values()) <= self._bound


class Sync:
    """One update from the first gradients of each step; those of another step are dropped.

    What decides is equality of the step's number: no token is handed out that could run out, and a worker that was late once
    loses that gradient and no other. As long as `target` workers are there, so many make an update. With fewer, all of them
    do: a worker that ends early or dies never leaves the others waiting.

    Args:
        target: N, gradients per update.
        workers: all that take part, N + b of them.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, Algorithms 3 and 4.
    """

    def __init__(self, target: int, workers: Iterable[int]) -> None:
        self._target = target
        self._members = set(workers)
        self._arrived: list[int] = []  # workers whose gradients of this step are here, in the order of their arrival

    @property
    def quorum(self) -> int:
        """How many gradients make the next update."""
        return min(self._target, len(self._members.union(self._arrived)))

    @property
    def arrived(self) -> tuple[int, ...]:
        """The workers whose gradients of this step are here."""
        return tuple(self._arrived)

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """The worker is waited for from now on."""
        self._members.add(worker_id)
        if worker_id in self._arrived:
            self._arrived.remove(worker_id)

    def leave(self, worker_id: int) -> None:
        """The worker is not waited for; its gradient of this step still counts."""
        self._members.discard(worker_id)

    def admit(self, update: UpdateInfo) -> Verdict:
        """Holds gradients of this step."""
        if update.step != update.version or update.worker_id in self._arrived:
            return Verdict.DROP
        self._arrived.append(update.worker_id)
        return Verdict.HOLD

    def complete(self) -> tuple[int, ...]:
        """The first workers of this step, once they are enough."""
        quorum = self.quorum
        return tuple(sorted(self._arrived[:quorum])) if 0 < quorum <= len(self._arrived) else ()

    def applied(self, update: UpdateInfo) -> None:
        """The next step begins."""
        self._arrived.clear()

    def may_read(self, worker_id: int) -> bool:
        """Always: the answer to a gradient comes with the decision on it."""
        return True


class AutoSync(Sync):
    """`Sync` that chooses the number of backup workers again and again, from the times of the gradients that have come.

    Begins without backups, and chooses for the first time after `every_steps` steps.

    Args:
        workers: all that take part.
        every_steps: between two choices.

    Attributes:
        backups: b of this step.
        steps_with: how many steps have been made with each b.
    """

    def __init__(self, workers: Iterable[int], *, every_steps: int = 20) -> None:
        super().__init__(0, workers)
        self.backups = 0
        self.steps_with: dict[int, int] = {}
        self._steps = 0
        self._controller = BackupController(max(1, len(self._members)), every_steps=every_steps)
        self._aim()

    def timed(self, worker_id: int, round_trip_s: float) -> None:
        """A worker's gradient came so long after it had been given the parameters, in time or too late."""
        if worker_id in self._members:
            self._controller.arrived(worker_id, round_trip_s)

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """One machine more, whose times are not known yet."""
        if worker_id not in self._members:
            self._controller.joined()
        super().join(worker_id, sequence)
        self._aim()

    def leave(self, worker_id: int) -> None:
        """One machine less."""
        if worker_id in self._members:
            self._controller.left(worker_id)
        super().leave(worker_id)
        self._aim()

    def applied(self, update: UpdateInfo) -> None:
        """The next step begins, perhaps with another number of backups."""
        super().applied(update)
        self.steps_with[self.backups] = self.steps_with.get(self.backups, 0) + 1
        self._controller.step_done(self._steps)
        self._steps += 1
        self._aim()

    def _aim(self) -> None:
        self.backups = self._controller.backups
        self._target = max(1, len(self._members) - self.backups)


class Follower(Sync):
    """A shard that takes the workers whom shard 0 chose, so that all shards apply the same gradients in a step.

    Where a chosen worker died between its messages to two shards, this shard's update is made without it.
    """

    def __init__(self, target: int, workers: Iterable[int]) -> None:
        super().__init__(target, workers)
        self._chosen: dict[int, tuple[int, ...]] = {}  # by step
        self.step = 0
        self.num_incomplete = 0

    def choose(self, step: int, workers: tuple[int, ...]) -> None:
        """What shard 0 has decided; of steps that are over, nothing is kept."""
        if step >= self.step:
            self._chosen[step] = workers

    def complete(self) -> tuple[int, ...]:
        """The chosen workers, once the gradients of all who are still there have come."""
        chosen = self._chosen.get(self.step, ())
        if not chosen:
            return ()
        here = [worker for worker in chosen if worker in self._arrived]
        if any(worker in self._members for worker in chosen if worker not in here):
            return ()
        here = here or self._arrived[:1]  # all chosen ones are dead: the step must end all the same
        if not here:
            return ()
        if set(here) != set(chosen):
            self.num_incomplete += 1
        return tuple(here)

    def applied(self, update: UpdateInfo) -> None:
        """The next step begins."""
        super().applied(update)
        self._chosen.pop(self.step, None)
        self.step = update.version + 1
