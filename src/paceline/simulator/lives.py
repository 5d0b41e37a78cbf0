"""Which simulated workers are alive: how they end, die and are replaced, and who learns of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.simulator.newcomers import SimulatedNewcomers
from paceline.simulator.scheduler import Scheduler


class Lives:
    """The lives of a machine's workers.

    Attributes:
        lost: workers that were killed, in that order.
        restarts: how many of them were replaced.
        newcomers: their replacements, if the others go on without the dead; None otherwise.
        incarnations: how often each worker was replaced, if it was.
        on_gone: called with a worker that has ended or was killed; set by the caller.
        restart: makes a worker's new incarnation and starts its program; set by the caller.
    """

    def __init__(
        self,
        cluster: Cluster,
        scheduler: Scheduler,
        network: Network,
        rounds: Sequence[Any],  # what waits for all workers that are left; has `lose`
        *,
        # If fewer than this many workers are left, they wait for replacements; None: rounds let no worker in.
        min_workers: int | None,
        # How many dead workers are replaced, each `Cluster.detection_s` plus `restart_s` after its death.
        restarts: int,
        own_vectors: Any | None,  # shared parameters with a vector per worker, or None
        has_servers: bool,  # whether servers must learn of a death
    ) -> None:
        self._cluster, self._scheduler, self._network, self._rounds = cluster, scheduler, network, rounds
        self._own_vectors, self._has_servers = own_vectors, has_servers
        self._restarts_left, self._num_dead, self._num_ended, self._is_abandoned = restarts, 0, 0, False
        self._awaited: set[int] = set()  # dead workers whose replacements have not begun
        self._done: set[int] = set()  # workers whose loops have ended
        self.lost: list[int] = []
        self.restarts = 0
        self.incarnations: dict[int, int] = {}
        self.newcomers: SimulatedNewcomers | None = None
        if min_workers is not None:
            self.newcomers = SimulatedNewcomers(scheduler, min_workers, lambda: self.restarts)
        self.on_gone: Callable[[int], object] = lambda worker_id: None
        self.restart: Callable[[int], object] | None = None

    def release(self) -> None:
        vars(self).clear()

    def end(self, worker_id: int) -> None:
        """Ends a worker's program and its further programs now; the others learn of it."""
        self._num_ended += 1
        self._scheduler.call_at(self._scheduler.now_s, partial(self._end, worker_id))

    def trains_no_more(self, worker_id: int) -> None:
        """A worker computes no further gradients, though its program can continue: no round waits for it.

        If it dies now, it is not replaced.
        """
        self._done.add(worker_id)
        for rounds in self._rounds:
            rounds.lose(worker_id, "its loop has ended")

    @property
    def all_dead(self) -> bool:
        """Whether every worker was killed, and none of them replaced, as far as others could let replacements in."""
        return self._is_abandoned or self._num_dead - self.restarts == self._cluster.workers

    @property
    def all_ended(self) -> bool:
        """Whether the program of every worker that was not killed, or of its replacement, has ended normally."""
        return self._num_dead - self.restarts + self._num_ended == self._cluster.workers

    def awaits(self, worker_id: int) -> bool:
        """Whether the run waits for a dead worker's replacement; those that others must let in are not waited for."""
        return self.newcomers is None and worker_id in self._awaited

    def _end(self, worker_id: int) -> None:
        self._scheduler.end_worker(worker_id)
        self.on_gone(worker_id)
        self._network.end(worker_id)
        self.trains_no_more(worker_id)
        self._end_newcomers()

    def enter(self, worker_id: int, epoch: int = -1) -> dict[str, Any] | None:
        """Waits until the others let a replacement in, as `SimulatedNewcomers.enter`; negative: its epoch does not matter."""
        assert self.newcomers is not None
        self._scheduler.call_at(self._scheduler.now_s, self._end_newcomers)
        return self.newcomers.enter(worker_id, self.incarnations[worker_id], epoch)

    def _end_newcomers(self) -> None:
        num_left = self._cluster.workers - self._num_dead + self.restarts - self._num_ended
        if self.newcomers is not None and self.newcomers.end_if_alone(num_left):
            self._is_abandoned = not self._num_ended

    def kill(self, worker_id: int) -> None:
        """A worker dies now, unless it is gone; the others learn of it after `Cluster.detection_s`."""
        if not self._network.is_gone(worker_id):
            self.lost.append(worker_id)
            self.lose(worker_id, is_replaced=self._restarts_left > 0 and worker_id not in self._done)

    def lose(self, worker_id: int, *, is_replaced: bool) -> None:
        """As `kill`, of a worker that was killed, or of a replacement that cannot take part."""
        reason, incarnation = f"killed at {self._scheduler.now_s:.6g} s", self.incarnations.get(worker_id, 0)
        self._num_dead += 1
        for rounds in self._rounds:  # first: a worker that the network tells of a death asks them whether it is one
            lose = partial(rounds.lose, worker_id, reason, died=incarnation)
            self._scheduler.call_at(self._scheduler.now_s + self._cluster.detection_s, lose)
        self._network.kill(worker_id)  # then: messages that its program sends while it is being ended must be lost
        if self._has_servers:  # they learn of it even if the others end before, as they must handle what follows
            heard_after_s = 2 * self._cluster.detection_s  # twice: they may be in the middle of an update
            self._scheduler.start(self._cluster.workers, partial(self._scheduler.sleep, heard_after_s))
        if is_replaced:
            self._awaited.add(worker_id)
            self._restarts_left, self.restarts = self._restarts_left - 1, self.restarts + 1
            self._scheduler.start(-1, partial(self._replace, worker_id), server=f"the successor of worker {worker_id}")
        self._scheduler.end_worker(worker_id)
        if self._own_vectors is not None:
            self._own_vectors.lose(worker_id)
        if self.newcomers is not None:
            self.newcomers.forget(worker_id, incarnation)
        self.on_gone(worker_id)
        self._end_newcomers()

    def _replace(self, worker_id: int) -> None:
        """Starts a dead worker's next incarnation once others know of its death and a process is up; the run waits for it."""
        self._scheduler.sleep(self._cluster.detection_s + self._cluster.restart_s)
        incarnation = self.incarnations.get(worker_id, 0) + 1
        self._network.replace(worker_id, incarnation)
        if self._own_vectors is not None and self.newcomers is None:
            self._own_vectors.come_back(worker_id)
        self.start_again(worker_id, incarnation)
        self._network.welcome(worker_id)

    def start_again(self, worker_id: int, incarnation: int) -> None:
        assert self.restart is not None
        self._awaited.discard(worker_id)
        self.incarnations[worker_id] = incarnation
        self.restart(worker_id)
