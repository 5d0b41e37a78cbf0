"""Whose gradients become an update, and when: in sync with backup workers, asynchronously, or with bounded clocks.

An admission is one shard's. It holds no vector and knows no message: the shard tells it who takes part, what has arrived and
what it has applied, and asks. So it runs alike in a server, in the simulator and in a test of 100,000 updates.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar

from paceline.algorithms.server.backups import BackupController
from paceline.algorithms.server.noise import NoiseMeter
from paceline.algorithms.server.update import UpdateInfo

__all__ = ["Admission", "AutoQuorum", "Clocks", "Follower", "Quorum", "Recent", "Verdict", "WeightByTime"]

_ROUND_TRIPS = 50  # of a worker, of which its time is the median
_ENOUGH = 3


class Verdict(Enum):
    """What becomes of a gradient that has arrived."""

    APPLY = "apply"  # now, by itself
    HOLD = "hold"  # until `complete` names its worker
    DROP = "drop"


class Admission:
    """Decides for one shard. As it is here, every gradient is applied as it arrives, and nobody waits.

    Attributes:
        backups: workers whose gradients this step can do without.
        incomplete: updates that were made of other gradients than shard 0's.
        absent: workers that take part, and bring nothing until the others have come where they wait.
    """

    times_workers: ClassVar[bool] = False  # whether `timed` is to be called

    backups = incomplete = 0
    absent: frozenset[int] = frozenset()

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker takes part from now on, with its update after `sequence`; what it brought before is forgotten."""

    def leave(self, worker_id: int) -> None:
        """A worker takes part no more: it has no more data, or it is dead. What it brought still counts."""

    def admit(self, update: UpdateInfo) -> Verdict:
        """What becomes of an update."""
        return Verdict.APPLY

    def complete(self) -> tuple[int, ...] | None:
        """The workers whose held gradients make one update now, in the order of their ids; None as long as none is due.

        () ends a step whose gradients are lost with their workers.
        """
        return None

    def applied(self, update: UpdateInfo) -> None:
        """An update was applied; `update.worker_id` is the lowest of those that made it."""

    def over(self, version: int) -> None:
        """The step that led to `version` is over; one that a successor begins with as well."""

    def may_read(self, worker_id: int) -> bool:
        """Whether a worker may have parameters for its next gradient."""
        return True

    def clock(self, worker_id: int) -> int:
        """The number after which a worker's updates are to be counted here, where it is above that of its last one."""
        return 0

    def told(self, worker_id: int, sequence: int) -> None:
        """A worker has sent so many updates, though some are not here: a dead server had answered them."""

    def timed(self, worker_id: int, round_trip_s: float) -> None:
        """A worker's gradient came so long after it had been given the parameters, in time or too late."""

    def past(self, worker_id: int) -> None:
        """A worker waits for the next step, and so brings nothing for this one."""

    def weight(self, worker_id: int) -> float:
        """The factor on a worker's gradients."""
        return 1.0

    def choose(self, step: int, workers: tuple[int, ...]) -> None:
        """Shard 0 has decided whose gradients make a step; (): it has died since, and nobody knows."""

    def state(self) -> dict[str, Any]:
        """What a successor needs."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""


class Recent(Admission):
    """Every gradient is applied that comes fewer than so many updates late; its worker goes on with the newest parameters.

    Args:
        threshold: R; 1 admits gradients of the current version only. Or what measures it: then that of the moment.

    Reference: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
        ICML 2025, arXiv:2501.16168 (without stops: a gradient under way is finished, and judged as it comes).
    """

    def __init__(self, threshold: int | NoiseMeter) -> None:
        self._threshold = threshold

    def admit(self, update: UpdateInfo) -> Verdict:
        threshold = self._threshold if isinstance(self._threshold, int) else self._threshold.gradients
        return Verdict.APPLY if update.staleness < threshold else Verdict.DROP


class WeightByTime(Admission):
    """Every gradient is applied as it arrives, multiplied by its worker's time per gradient, in proportion to all workers'.

    A worker that takes t_i per gradient makes 1 / t_i of them; its factor is t_i (1/n) sum_j 1 / t_j. So all workers move the
    parameters equally far in the same time, and the mean factor over all gradients is 1. A time is the median of the last
    round trips, so that a pause makes no long step. The first one has the worker's start in it and is left out; a factor is 1
    until three more have come.

    Reference: "Rescaled Asynchronous SGD: Optimal Distributed Optimization under Data and System Heterogeneity", 2026,
        arXiv:2605.13434, which takes times as known; how they are measured, and that the factors' mean is 1, is our own.
    """

    times_workers: ClassVar[bool] = True

    def __init__(self) -> None:
        self._trips_s: dict[int, deque[float]] = {}  # of each worker since its start
        self._times_s: dict[int, float] = {}

    def timed(self, worker_id: int, round_trip_s: float) -> None:
        if worker_id not in self._trips_s:
            self._trips_s[worker_id] = deque(maxlen=_ROUND_TRIPS)
            return
        trips_s = self._trips_s[worker_id]
        trips_s.append(round_trip_s)
        if len(trips_s) >= _ENOUGH:
            self._times_s[worker_id] = statistics.median(trips_s)

    def join(self, worker_id: int, sequence: int = 0) -> None:
        self.leave(worker_id)

    def leave(self, worker_id: int) -> None:
        self._trips_s.pop(worker_id, None)
        self._times_s.pop(worker_id, None)

    def weight(self, worker_id: int) -> float:
        """t_i (1/n) sum_j 1 / t_j, over those whose times are known; 1 where the worker's is not, or no time passes."""
        times_s = self._times_s
        if worker_id not in times_s or not min(times_s.values()):
            return 1.0
        return times_s[worker_id] * sum(1.0 / time_s for time_s in times_s.values()) / len(times_s)

    def state(self) -> dict[str, Any]:
        return {"trips_s": {worker: list(trips_s) for worker, trips_s in self._trips_s.items()}}

    def load(self, state: dict[str, Any]) -> None:
        for worker, trips_s in state["trips_s"].items():
            for one in [0.0, *trips_s]:
                self.timed(worker, one)


class Clocks(Admission):
    """Stale synchronous parallel: no worker begins a step while it is more than `clock_bound` steps ahead of the slowest.

    A worker's clock is the number of its last update. The bound's promise: what a worker reads at clock c has all updates of
    all workers up to number c - s. With several shards each keeps clocks, so that the promise holds for what each sends, and
    no message is sent for it. Clocks are bounded, not versions: between two updates of the slowest worker each of the n - 1
    others may apply up to 2 s + 1, so the staleness in versions is larger, up to (2 s + 1)(n - 1).

    Workers cannot wait for each other in a circle, one here and one at another shard. A worker sends its update to all shards
    before it waits at any, and an update counts as it comes, whoever waits. So once what is under way has come, clocks are the
    same at all shards, and the slowest worker may read at each of them. Three things could set shards apart, and do not:

    - A worker that joins late begins at the slowest clock of the others. That differs from shard to shard, by what is under
      way: each tells its own, and the worker counts on from the greatest, and asks the others again with that. Until its first
      update it is the slowest everywhere. One that was taken for dead, and is not, is told likewise.
    - A server's successor knows the clocks of its snapshot. Workers whose updates wait for an answer send them again; others
      tell it the number of their last as they hear of it, at whichever shard they wait.
    - A worker that has left is waited for nowhere, once all shards have heard; nor is one that is in `worker.sum`.

    A worker that joins at a successor which has not heard of the others yet begins at the snapshot's clocks; they wait for it.

    Args:
        clock_bound: s, from 0, which is as good as a barrier.
        workers: those that take part from the beginning.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    def __init__(self, clock_bound: int, workers: Iterable[int]) -> None:
        self._bound = clock_bound
        self.clocks = dict.fromkeys(workers, 0)
        self._slowest = 0  # clock before the last one left: where somebody would join whom nobody waits for

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker joins at the slowest clock of the others, if it is not ahead of that already."""
        self.leave(worker_id)
        self.clocks[worker_id] = max(sequence, min(self.clocks.values(), default=self._slowest))

    def leave(self, worker_id: int) -> None:
        """The others no longer wait for it."""
        self._slowest = min(self.clocks.values(), default=self._slowest)
        self.clocks.pop(worker_id, None)

    def applied(self, update: UpdateInfo) -> None:
        self.told(update.worker_id, update.sequence)

    def told(self, worker_id: int, sequence: int) -> None:
        """The worker's clock is this, if it takes part; a clock never goes back."""
        if worker_id in self.clocks:
            self.clocks[worker_id] = max(self.clocks[worker_id], sequence)

    def may_read(self, worker_id: int) -> bool:
        """Whether the worker is at most `clock_bound` ahead of the slowest."""
        if worker_id not in self.clocks:
            return True
        slowest = min(clock for one, clock in self.clocks.items() if one == worker_id or one not in self.absent)
        return self.clocks[worker_id] - slowest <= self._bound

    def clock(self, worker_id: int) -> int:
        return self.clocks.get(worker_id, 0)

    def state(self) -> dict[str, Any]:
        return {"clocks": dict(self.clocks), "slowest": self._slowest}

    def load(self, state: dict[str, Any]) -> None:
        self.clocks, self._slowest = dict(state["clocks"]), state["slowest"]


class Quorum(Admission):
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
    def size(self) -> int:
        """How many gradients make the next update."""
        return min(self._target, len((self._members - self.absent).union(self._arrived)))

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
        if update.step != update.version or update.worker_id in self._arrived:
            return Verdict.DROP
        self._arrived.append(update.worker_id)
        return Verdict.HOLD

    def complete(self) -> tuple[int, ...] | None:
        size = self.size
        return tuple(sorted(self._arrived[:size])) if 0 < size <= len(self._arrived) else None

    def over(self, version: int) -> None:
        self._arrived.clear()


class AutoQuorum(Quorum):
    """`Quorum` that chooses the number of backup workers again and again, from the times of the gradients that have come.

    Begins without backups, and chooses for the first time after `every_steps` steps.

    Args:
        workers: all that take part.
        every_steps: between two choices.

    Attributes:
        backups: b of this step.
        steps_with: how many steps have been made with each b.
    """

    times_workers: ClassVar[bool] = True

    def __init__(self, workers: Iterable[int], *, every_steps: int = 20) -> None:
        super().__init__(0, workers)
        self.steps_with: dict[int, int] = {}
        self._steps = 0
        self._controller = BackupController(max(1, len(self._members)), every_steps=every_steps)
        self._aim()

    def timed(self, worker_id: int, round_trip_s: float) -> None:
        if worker_id in self._members:
            self._controller.arrived(worker_id, round_trip_s)

    def join(self, worker_id: int, sequence: int = 0) -> None:
        if worker_id not in self._members:
            self._controller.joined()
        super().join(worker_id, sequence)
        self._aim()

    def leave(self, worker_id: int) -> None:
        if worker_id in self._members:
            self._controller.left(worker_id)
        super().leave(worker_id)
        self._aim()

    def applied(self, update: UpdateInfo) -> None:
        """Counts the step; the next one has perhaps another number of backups."""
        self.steps_with[self.backups] = self.steps_with.get(self.backups, 0) + 1
        self._controller.step_done(self._steps)
        self._steps += 1
        self._aim()

    def _aim(self) -> None:
        self.backups = self._controller.backups
        self._target = max(1, len(self._members) - self.backups)


class Follower(Quorum):
    """A shard that takes the workers that shard 0 chose, so that all shards apply the same gradients in a step.

    Where a chosen worker died between its messages to two shards, this shard's update is made without it. Where all of them
    did, or where shard 0 died and its choice is not known, it is made by those that are here; if there are none, the
    step ends without an update.
    """

    def __init__(self, target: int, workers: Iterable[int]) -> None:
        super().__init__(target, workers)
        self._chosen: dict[int, tuple[int, ...]] = {}  # by step
        self._past: set[int] = set()  # workers that wait for the next step
        self.step = 0

    def past(self, worker_id: int) -> None:
        """A gradient of this step that is not here has died with the process that the worker had."""
        self._past.add(worker_id)

    def choose(self, step: int, workers: tuple[int, ...]) -> None:
        """What shard 0 has decided; of steps that are over, nothing is kept."""
        if step >= self.step:
            self._chosen[step] = workers or self._chosen.get(step, ())

    def complete(self) -> tuple[int, ...] | None:
        """The chosen workers, once the gradients of all that are still there have come."""
        if self.step not in self._chosen:
            return None
        chosen = self._chosen[self.step]
        here = [worker for worker in chosen if worker in self._arrived]
        if any(worker in self._members - self._past for worker in chosen if worker not in here):
            return None
        here = here or self._arrived
        self.incomplete += set(here) != set(chosen)
        return tuple(sorted(here))

    def over(self, version: int) -> None:
        super().over(version)
        self.step = version
        self._past.clear()
        self._chosen = {step: workers for step, workers in self._chosen.items() if step >= version}
