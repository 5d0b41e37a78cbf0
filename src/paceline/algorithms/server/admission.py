"""Whose gradients become an update, and when: in sync with backup workers, asynchronously, or with bounded clocks.

Each shard has its own admission, which holds no vectors and handles no messages: the shard reports members, arrivals and
updates, and asks. So it runs in a server, in the simulator and in a test of 100,000 updates without changes.
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

_ROUND_TRIPS = 50  # of a worker, of which its time is the median
_ENOUGH = 3


class Verdict(Enum):
    """The decision on a gradient that has arrived."""

    APPLY = "apply"  # now, by itself
    HOLD = "hold"  # until `complete` names its worker
    DROP = "drop"


class Admission:
    """Decides for one shard. This base class applies every gradient as it arrives, without waiting.

    Attributes:
        backups: workers whose gradients this step can do without.
        incomplete: updates that contain different gradients than shard 0's.
        absent: members that send nothing until the others have reached the meeting where they wait.
    """

    times_workers: ClassVar[bool] = False  # whether the shard must call `timed`

    backups = incomplete = 0
    absent: frozenset[int] = frozenset()

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker joins, with its update after `sequence`; its earlier gradients are forgotten."""

    def leave(self, worker_id: int) -> None:
        """A worker leaves: it has no more data, or is dead. Its gradients still count."""

    def admit(self, update: UpdateInfo) -> Verdict:
        return Verdict.APPLY

    def complete(self) -> tuple[int, ...] | None:
        """The workers whose held gradients make one update now, by ascending id; None if no update is due.

        () ends a step whose gradients died with their workers.
        """
        return None

    def applied(self, update: UpdateInfo) -> None:
        """An update was applied; `update.worker_id` is the lowest of those that made it."""

    def over(self, version: int) -> None:
        """The step that led to `version` is over; a successor also calls it at its start."""

    def may_read(self, worker_id: int) -> bool:
        """Whether a worker may have parameters for its next gradient."""
        return True

    def clock(self, worker_id: int) -> int:
        """The number from which this shard counts a worker's updates, if above that of its last one."""
        return 0

    def told(self, worker_id: int, sequence: int) -> None:
        """A worker has sent `sequence` updates; some were answered by a dead server and are not here."""

    def timed(self, worker_id: int, round_trip_s: float) -> None:
        """A worker's gradient arrived, in time or late, `round_trip_s` after the worker was sent the parameters."""

    def past(self, worker_id: int) -> None:
        """A worker waits for the next step, and so sends no gradient for this one."""

    def weight(self, worker_id: int) -> float:
        """The factor on a worker's gradients."""
        return 1.0

    def choose(self, step: int, workers: tuple[int, ...]) -> None:
        """Shard 0 has chosen whose gradients make a step; (): the choice died with its server."""

    def state(self) -> dict[str, Any]:
        """The state for a successor."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""


class Recent(Admission):
    """Applies gradients that are fewer than R updates late, drops the others; workers continue with the newest parameters.

    Args:
        threshold: R; 1 admits only gradients of the current version. Or a meter, whose current number is used.

    Reference: Maranjyan, Tyurin and Richtárik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity",
        ICML 2025, arXiv:2501.16168 (without stops: a gradient under way is finished, and judged on arrival).
    """

    def __init__(self, threshold: int | NoiseMeter) -> None:
        self._threshold = threshold

    def admit(self, update: UpdateInfo) -> Verdict:
        threshold = self._threshold if isinstance(self._threshold, int) else self._threshold.gradients
        return Verdict.APPLY if update.staleness < threshold else Verdict.DROP


class WeightByTime(Admission):
    """Applies every gradient as it arrives, scaled in proportion to its worker's time per gradient.

    A worker that takes t_i per gradient makes 1 / t_i of them; its factor is t_i (1/n) sum_j 1 / t_j. So all workers move the
    parameters equally far in the same time, and the mean factor over all gradients is 1. A time is the median of the last
    round trips, so that a pause does not cause a long step. The first round trip includes the worker's start and does not
    count; the factor is 1 until three more have arrived.

    Reference: "Rescaled Asynchronous SGD: Optimal Distributed Optimization under Data and System Heterogeneity", 2026,
        arXiv:2605.13434, which takes times as known; our own are their measurement and the factors' mean of 1.
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
        """t_i (1/n) sum_j 1 / t_j, over the workers with known times; 1 if this worker's is unknown, or no time passes."""
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

    A worker's clock is the number of its last update. The guarantee: what a worker reads at clock c includes all updates of
    all workers up to number c - s. Each shard keeps its own clocks, so the guarantee holds for each shard's parameters without
    extra messages. Clocks are bounded, not versions: between two updates of the slowest worker each of the n - 1 others may
    apply up to 2 s + 1, so the staleness in versions is larger, up to (2 s + 1)(n - 1).

    Workers that wait at different shards cannot deadlock. A worker sends its update to all shards before it waits at any, and
    an update counts on arrival, even if its worker waits. So once all messages have arrived, clocks are equal at all shards,
    and the slowest worker may read at each. Three events could set shards apart, and do not:

    - A late worker begins at the slowest clock of the others, which messages under way make differ between shards. Each shard
      reports its own; the worker counts on from the greatest, and asks the others again with that. Until its first update it
      is the slowest everywhere. A worker wrongly taken for dead rejoins in the same way.
    - A server's successor knows the clocks of its snapshot. Workers whose updates are unanswered send them again; others tell
      it the number of their last update when they notice it, at any shard where they wait.
    - No shard waits for a worker that has left, once it knows; nor for one in `worker.sum`.

    A worker that joins at a successor before the others have reported begins at the snapshot's clocks; the others wait for it.

    Args:
        clock_bound: s, from 0, which acts as a barrier.
        workers: members at the start.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
    """

    def __init__(self, clock_bound: int, workers: Iterable[int]) -> None:
        self._bound = clock_bound
        self.clocks = dict.fromkeys(workers, 0)
        self._slowest = 0  # the clock at which a worker joins if there are no others

    def join(self, worker_id: int, sequence: int = 0) -> None:
        """A worker joins at the slowest clock of the others, unless it is ahead of that."""
        self.leave(worker_id)
        self.clocks[worker_id] = max(sequence, min(self.clocks.values(), default=self._slowest))

    def leave(self, worker_id: int) -> None:
        self._slowest = min(self.clocks.values(), default=self._slowest)
        self.clocks.pop(worker_id, None)

    def applied(self, update: UpdateInfo) -> None:
        self.told(update.worker_id, update.sequence)

    def told(self, worker_id: int, sequence: int) -> None:
        if worker_id in self.clocks:
            self.clocks[worker_id] = max(self.clocks[worker_id], sequence)

    def may_read(self, worker_id: int) -> bool:
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

    Only the step's number decides: there are no tokens to run out, and a late worker loses only that gradient. `target`
    workers make an update; if fewer are left, all of them do: a worker that ends early or dies never blocks the others.

    Args:
        workers: all members, N + b of them.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981, Algorithms 3 and 4.
    """

    def __init__(self, target: int, workers: Iterable[int]) -> None:
        self._target = target  # N, gradients per update
        self._members = set(workers)
        self._arrived: list[int] = []  # workers whose gradients of this step have arrived, in order

    @property
    def size(self) -> int:
        """How many gradients make the next update."""
        return min(self._target, len((self._members - self.absent).union(self._arrived)))

    def join(self, worker_id: int, sequence: int = 0) -> None:
        self._members.add(worker_id)
        if worker_id in self._arrived:
            self._arrived.remove(worker_id)

    def leave(self, worker_id: int) -> None:
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
    """A `Quorum` that keeps adjusting the number of backup workers to the measured gradient times.

    Begins without backups; first chooses after `every_steps` steps.
    """

    times_workers: ClassVar[bool] = True

    def __init__(self, workers: Iterable[int], *, every_steps: int = 20) -> None:
        super().__init__(0, workers)
        self.steps_with: dict[int, int] = {}  # the number of steps made with each b
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
        self.steps_with[self.backups] = self.steps_with.get(self.backups, 0) + 1
        self._controller.step_done(self._steps)
        self._steps += 1
        self._aim()

    def _aim(self) -> None:
        self.backups = self._controller.backups
        self._target = max(1, len(self._members) - self.backups)


class Follower(Quorum):
    """Follows shard 0's choice of workers, so that all shards apply the same gradients in a step.

    If a chosen worker died between its messages to two shards, this shard updates without it. If all chosen workers did, or if
    shard 0 died with its choice, this shard uses the gradients that have arrived; if there are none, the step ends without an
    update.
    """

    def __init__(self, target: int, workers: Iterable[int]) -> None:
        super().__init__(target, workers)
        self._chosen: dict[int, tuple[int, ...]] = {}  # by step
        self._past: set[int] = set()  # workers that wait for the next step
        self.step = 0

    def past(self, worker_id: int) -> None:
        self._past.add(worker_id)

    def choose(self, step: int, workers: tuple[int, ...]) -> None:
        if step >= self.step:
            self._chosen[step] = workers or self._chosen.get(step, ())

    def complete(self) -> tuple[int, ...] | None:
        """The chosen workers, once the gradients of all that are still alive have arrived."""
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


class WarmStart(Admission):
    """Applies every gradient as it arrives, but lets only one worker read until `num_updates` updates have been made.

    That worker is the member with the lowest id, so if it dies or runs out of data, the next one takes over. A successor, or a
    resumed run, continues the count.
    """

    def __init__(self, num_updates: int, workers: Iterable[int]) -> None:
        self._num_updates = num_updates
        self._members = set(workers)
        self._version = 0

    def over(self, version: int) -> None:
        self._version = version

    def join(self, worker_id: int, sequence: int = 0) -> None:
        self._members.add(worker_id)

    def leave(self, worker_id: int) -> None:
        self._members.discard(worker_id)

    def may_read(self, worker_id: int) -> bool:
        return self._version >= self._num_updates or worker_id <= min(self._members, default=worker_id)
