"""The batches that a loop under `attach` gets: one epoch after the other, shared with the other workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.algorithms import Algorithm
from paceline.batches import BatchPlan, length_of
from paceline.environment import WorkerEnvironment
from paceline.errors import UsageError
from paceline.final_mean import Given
from paceline.sources import ABSENT, END, BatchClaims, one_by_one
from paceline.worker_storage import completed

__all__ = ["WorkerBatches"]


class WorkerBatches:
    """Hands out a worker's batches, begins a step with each, and saves the worker's part of a checkpoint before an epoch.

    Args:
        worker_id: this worker.
        num_workers: workers of the run.
        algorithm: how they agree.
        environment: of this worker; None: alone.
        session: its membership in the run.
        replica: whose steps begin.
        optimizer: the user's, whose state is saved.
        taken: batches that this worker took before (a resumed run, or an earlier incarnation).
        bind_newest: binds the model to a copy of the newest parameters.

    Attributes:
        given: what the loop was given by a counter that it shares with the other workers.
    """

    def __init__(
        self,
        *,
        worker_id: int,
        num_workers: int,
        algorithm: Algorithm,
        environment: WorkerEnvironment | None,
        session: Any,
        replica: Any,
        optimizer: torch.optim.Optimizer,
        taken: int,
        bind_newest: Callable[[], None],
    ) -> None:
        self.worker_id = worker_id
        self.num_workers = num_workers
        self.algorithm = algorithm
        self._environment = environment
        self._session = session
        self._replica = replica
        self._optimizer = optimizer
        self._taken = taken
        self._bind_newest = bind_newest
        self._claims: dict[tuple[int, int], BatchClaims] = {}
        self.given = Given()
        self._epoch = 0
        self._is_epoch_told = False
        self._incomplete: int | None = None  # a checkpoint that not all workers have written

    def epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The next epoch's batches for this worker."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._epoch > 1 and self._session.stopped():  # a loop of very many epochs goes through those that are left
            return
        seed = self._environment.seed if self._environment is not None else 0
        alone = self.num_workers == 1 and self._environment is None
        plan_and_fetch = None if alone else one_by_one(loader, seed)
        if plan_and_fetch is None:
            yield from self._whole_or_strided(loader)
            return
        plan, fetch = plan_and_fetch
        claims = self._claims_for(plan)
        for number in self._numbers(claims, epoch):
            started_s = self._replica.now_s()
            if number == ABSENT:
                self._replica.begin(started_s, -1, None, absent=True)
                continue
            batch = fetch(plan.indices(number))
            if not self._is_epoch_told:
                self._is_epoch_told = True
                self._session.tell_epoch(plan.batches_per_epoch * length_of(batch))
            self._replica.begin(started_s, number, batch)
            yield batch
        # What the loop does between two epochs, such as to evaluate, it does on a copy that nobody else writes.
        if self._replica.idle:
            self._bind_newest()
        if self._replica.num_begun == 0 and epoch == 0 and plan.batches_per_epoch < self.num_workers:
            warnings.warn(
                f"This worker got no batch: {plan.batches_per_epoch} batches an epoch are too few for"
                f" {self.num_workers} workers.",
                stacklevel=3,
            )

    def _numbers(self, claims: BatchClaims, epoch: int) -> Iterator[int]:
        plan, first = claims.plan, True
        if self.algorithm.lockstep:
            rounds = plan.rounds_per_epoch(self.num_workers)
            claims.taken = max(claims.taken, epoch * rounds)  # the loop may have left the epoch before at a `break`
            while claims.taken < (epoch + 1) * rounds:
                first = self._maybe_save(claims, epoch, first, parameters=self.worker_id == 0)
                self._maybe_complete()
                yield claims.next()
                if self._session.stopped():
                    return
            return
        while not self._session.stopped():
            number = claims.next(end=(end := (epoch + 1) * plan.batches_per_epoch))
            if number == END:
                self.given = self.given._replace(reached=max(end, self.given.reached))
                return
            self.given = Given(self.given.taken + 1, max(number + 1, self.given.reached))
            parameters = number % plan.batches_per_epoch == 0
            claims.taken -= 1
            first = self._maybe_save(claims, epoch, first, parameters=parameters)
            claims.taken += 1
            yield number

    def _maybe_save(self, claims: BatchClaims, epoch: int, first: bool, *, parameters: bool) -> bool:
        """Saves this worker's part of the epoch's checkpoint before its first batch, if one is asked for."""
        environment = self._environment
        if not first or epoch == 0 or environment is None or environment.checkpoint is None:
            return False
        self._session.arena.store("epoch", max(epoch, self._session.arena.load("epoch")))
        if self._session.arena.load("checkpoint_epoch") in (-1, epoch):
            number = epoch * claims.plan.batches_per_epoch
            self._session.save(number, self._optimizer, claims.taken, parameters=parameters)
            if parameters and not environment.supervised:
                self._incomplete = number
        return False

    def _maybe_complete(self) -> None:
        """Worker 0 marks a checkpoint complete when all have saved their parts, where no supervisor does."""
        if self._incomplete is not None and completed(self._environment, self._incomplete, self.num_workers):
            self._incomplete = None

    def taken_so_far(self) -> int:
        """Batches that this worker has taken."""
        return max((claims.taken for claims in self._claims.values()), default=self._taken)

    def _claims_for(self, plan: BatchPlan) -> BatchClaims:
        """The claims on one data set; a second data set of another size would need a counter of its own."""
        key = (plan.num_samples, plan.batch_size)
        if key not in self._claims:
            if self._claims:
                raise UsageError(
                    "worker.batches was given loaders of different sizes; use it for the training data only."
                )
            self._claims[key] = BatchClaims(
                plan,
                worker_id=self.worker_id,
                num_workers=self.num_workers,
                lockstep=self.algorithm.lockstep,
                taken=self._taken,
                **self._session.batch_claims(),
            )
        return self._claims[key]

    def _whole_or_strided(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self.algorithm.lockstep and self.num_workers > 1:
            raise UsageError(
                "Lockstep methods need to know how many batches there are: give worker.batches a DataLoader with a sized data"
                " set, or a list of batches."
            )
        if self.num_workers == 1:
            yield from self._whole(loader)
            return
        iterator = iter(loader)
        index = -1
        while not self._session.stopped():
            started_s = self._replica.now_s()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            index += 1
            if index % self.num_workers != self.worker_id:
                continue
            self._replica.begin(started_s, -1, batch)
            yield batch

    def _whole(self, loader: Iterable[Any]) -> Iterator[Any]:
        begin, now_s = self._replica.begin, self._replica.now_s
        started_s = now_s()
        for batch in loader:
            begin(started_s, -1, batch)
            yield batch
            if self._session.stopped():
                return
            started_s = now_s()
