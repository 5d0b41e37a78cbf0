"""The next batch of a worker: claimed from a shared counter, from its own part, or given by its place in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.data.plan import BatchPlan, Dynamic
from paceline.data.round_deal import ALL_LEFT, Left, RoundDeal
from paceline.ports.round_shares import RoundShares
from paceline.ports.views import Survivors

END = -1
ABSENT = -2  # a lockstep round in which this worker has no batch: it takes part and weighs zero


def _before(end: int) -> Callable[[int], bool]:
    return lambda place: place < end


def _claimed_at(address: int) -> Callable[[], int]:
    """Claims the next number of a counter that processes share."""
    # Its compiled code takes a while to import; simulations do not need it.
    from paceline.memory.atomics import fetch_add

    return lambda: fetch_add(address, 1)


class BatchClaims:
    """Hands out batch numbers: global numbers over all epochs, `epoch * batches_per_epoch + index`.

    Args:
        counter: address of the shared counter of claimed batches, or a function that claims the next number.
        max_epochs: epochs to hand out; None: no end.
        max_steps: batches for this worker; None: no limit.
        taken: batches that this worker took before (in a resumed run, or an earlier incarnation).
        done: without lockstep: batches to skip, because a resumed run begins with their updates.
        left: in lockstep: the batches that remain for a resumed run, with any number of workers.
        tracks, survivors: as for `RoundDeal`.

    Attributes:
        deal: assigns the rounds' batches, in lockstep, unless each worker has its own part.
        shares: sizes of the batches, if the plan divides rounds by speed.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        worker_id: int,
        lockstep: bool,
        counter: int | Callable[[], int],
        max_epochs: float | None = None,
        max_steps: int | None = None,
        taken: int = 0,
        done: Collection[int] = (),
        left: Left = ALL_LEFT,
        tracks: bool = False,
        survivors: Survivors | None = None,
    ) -> None:
        self.plan = plan
        self.taken = taken
        self._done = done
        self._worker_id = worker_id
        self._claim = counter if callable(counter) else _claimed_at(counter)
        self._max_steps = max_steps
        self._own_parts = not isinstance(plan.partition, Dynamic)
        if lockstep:
            self._per_epoch = plan.rounds_per_epoch()
        elif self._own_parts:
            self._per_epoch = len(plan.worker_batches(worker_id, 0))
        else:
            self._per_epoch = plan.batches_per_epoch
        self._limit: int | None = None
        if max_epochs is not None:
            self._limit = math.ceil(round(max_epochs * self._per_epoch, 6))
        self.deal: RoundDeal | None = None
        self.shares = RoundShares(plan.num_workers, plan.batch_size) if plan.by_speed else None
        if lockstep and not self._own_parts:
            self.deal = RoundDeal(
                worker_id, plan.num_workers, left, tracks=tracks, survivors=survivors, shares=self.shares
            )
            if self._limit is not None:  # in rounds so far
                whole, rest = divmod(self._limit, self._per_epoch)
                self._limit = whole * plan.batches_per_epoch + rest * plan.num_workers
        self._first_epoch, self._epoch = left.least // plan.batches_per_epoch, -1

    def enter(self, given: dict[str, Any]) -> None:
        """Joins the rounds with the state from `RoundDeal.let_in` of another worker."""
        assert self.deal is not None
        self.deal.enter(given)
        self.taken, self._epoch = self.deal.begun - 1, self.deal.epoch

    def next(self) -> int:
        """The next batch number, ABSENT, or END."""
        if self._max_steps is not None and self.taken >= self._max_steps:
            return END
        if self.deal is not None:
            number = self._next_dealt(self.deal)
        elif self._own_parts:
            while (number := self._next_in_order()) in self._done:
                self.taken += 1
        else:
            while (number := self._claim()) in self._done:
                pass
            if self._limit is not None and number >= self._limit:
                return END
        if number != END:
            self.taken += 1
            if self.deal is not None:
                self.deal.hand_out(self.taken - 1)
                self.deal.begun = self.taken
                self.deal.claim(self.taken)
        return number

    def indices(self, number: int) -> torch.Tensor:
        return self.plan.indices(number, self.shares)

    def size(self, number: int) -> int:
        return self.plan.size(number, self.shares)

    def left(self) -> Left | None:
        """The batches that remain for a resumed run; none past `max_epochs`."""
        left = self.deal.left(self.taken) if self.deal is not None else None
        return left if left is None or self._limit is None else left._replace(first=min(left.first, self._limit))

    def _begin_epoch(self, deal: RoundDeal, epoch: int) -> None:
        self._epoch, numbers = epoch, self.plan.batches_per_epoch
        deal.unmet(lambda place: place < numbers)
        deal.begin(self.taken, epoch, numbers)

    def _next_dealt(self, deal: RoundDeal) -> int:
        numbers = self.plan.batches_per_epoch
        if self._epoch < 0:
            self._begin_epoch(deal, self._first_epoch)
        while True:
            before, end = self._epoch * numbers, numbers
            if self._limit is not None:
                end = min(numbers, self._limit - before)
            if deal.is_over(self.taken, _before(end)):
                deal.settle()
            if not deal.is_over(self.taken, _before(end)):
                place = deal.place(self.taken)
                return before + place if place < end else ABSENT
            if not deal.is_over(self.taken, _before(numbers)):
                return END
            self._begin_epoch(deal, self._epoch + 1)

    def _next_in_order(self) -> int:
        if self._limit is not None and self.taken >= self._limit:
            return END
        epoch, index = divmod(self.taken, self._per_epoch)
        own = self.plan.worker_batches(self._worker_id, epoch)
        return own[index] if index < len(own) else ABSENT


@dataclass(eq=False)
class DatasetBatches:
    """Batches of a map-style data set: `(number, inputs, targets)`; `(-1, None, None)` in a round without a batch.

    A `TensorDataset` of inputs and targets is indexed as a whole; others are collated sample by sample.
    """

    dataset: Dataset[Any]
    claims: BatchClaims
    #: Called at this worker's first batch of an epoch, with the epoch and whether the batch is its first.
    on_epoch: Callable[[int, bool], None] | None = None

    def __post_init__(self) -> None:
        dataset, self._epoch = self.dataset, -1
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and len(dataset.tensors) == 2 else None

    def next(self) -> tuple[int, Any, Any] | None:
        number = self.claims.next()
        if number == END:
            return None
        if number == ABSENT:
            return (-1, None, None)
        plan = self.claims.plan
        epoch, index = divmod(number, plan.batches_per_epoch)
        if epoch > self._epoch:
            if self.on_epoch is not None:
                self.on_epoch(epoch, index == 0)
            self._epoch = epoch
        return (number, *self._load(self.claims.indices(number)))

    def _load(self, indices: torch.Tensor) -> tuple[Any, Any]:
        if self._tensors is not None:
            inputs, targets = self._tensors
            return inputs.index_select(0, indices), targets.index_select(0, indices)
        samples: Any = self.dataset
        inputs, targets = default_collate([samples[i] for i in indices.tolist()])
        return inputs, targets
