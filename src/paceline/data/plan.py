"""Which worker trains on what: an epoch is each sample once in total, however many workers share it.

Pure functions of a seed: no torch.distributed, no shared memory, no global generator. Batches carry one number for the
whole run, `epoch * batches_per_epoch + index`, so that a batch can be named in an event, a message or a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.specs.bounds import ABOVE_0
from paceline.specs.registry import Registry
from paceline.specs.types import check_fields

__all__ = [
    "BatchPlan",
    "BatchSource",
    "Dynamic",
    "Fixed",
    "Partition",
    "Skewed",
    "derived_seed",
    "length_of",
    "partition_registry",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Base of the three ways to share the samples among workers."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dynamic(Partition):
    """Any worker may take any next batch: equal samples in total, more of them for faster workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed(Partition):
    """Each worker owns an equal part for the whole run; each epoch reshuffles inside the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skewed(Partition):
    """Each worker owns a part with its own mix of labels, as where data stay at their source.

    Args:
        alpha: concentration of the Dirichlet distribution by which each label's samples are divided among the workers;
            0.1 gives nearly one label per worker, 100 nearly equal mixes.
    """

    alpha: Annotated[float, ABOVE_0] = 0.5


partition_registry = Registry("partition")
partition_registry.register("dynamic", Dynamic)
partition_registry.register("fixed", Fixed)
partition_registry.register("skewed", Skewed)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batches of a whole run, the same on every worker that builds the plan from the same arguments.

    Under `Dynamic` the workers share one sequence of batches: each takes the next number from a counter, or, in
    lockstep, `round_batch`. Under `Fixed` and `Skewed` an epoch's numbers are first worker 0's batches, then worker
    1's: `worker_batches`.

    Args:
        num_samples: samples in the data set.
        batch_size: samples per batch; the last batch of an epoch (of a part) may be shorter.
        seed: of the permutations and of the parts, 0 or more.
        shuffle: permute anew each epoch; otherwise samples keep the data set's order.
        partition: how the workers share the samples.
        num_workers: workers; `Dynamic` batches do not depend on it.
        drop_last: leave out the short last batch of an epoch (of a part).
        labels: class of each sample (num_samples,), for `Skewed` only.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    partition: Partition = field(default_factory=Dynamic)
    num_workers: int = 1
    drop_last: bool = False
    labels: Tensor | None = field(default=None, repr=False, compare=False)
    _parts: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    _first_batches: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _orders: dict[str, tuple[tuple[int, Tensor, tuple[Tensor, ...]], ...]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("batch_size", 1), ("num_workers", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be {least} or more, not {getattr(self, name)}.")
        parts = _parts(self)
        counts = [self._num_batches(len(part)) for part in parts]
        if min(counts) == 0:
            raise UsageError(
                f"batch_size {self.batch_size} with drop_last leaves a part of {min(map(len, parts))} samples "
                "without a batch; lower batch_size or keep the last batch."
            )
        firsts = tuple(int(first) for first in np.cumsum([0, *counts]))
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_first_batches", firsts)
        object.__setattr__(self, "_orders", {"recent": ()})
        starts = (range(0, count * self.batch_size, self.batch_size) for count in counts)
        sizes = (min(self.batch_size, len(part) - at) for part, own in zip(parts, starts, strict=True) for at in own)
        object.__setattr__(self, "_sizes", tuple(sizes))

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one epoch, over all workers."""
        return self._first_batches[-1]

    def num_batches_for(self, epochs: float) -> int:
        """Batches in so many epochs, over all workers; fractions round up to whole batches.

        >>> BatchPlan(num_samples=100, batch_size=10).num_batches_for(0.25)
        3
        """
        return math.ceil(round(epochs * self.batches_per_epoch, 6))

    def rounds_per_epoch(self, num_workers: int | None = None) -> int:
        """Lockstep rounds in one epoch; the last rounds may lack some workers."""
        if len(self._parts) == 1:
            return -(-self.batches_per_epoch // (num_workers or self.num_workers))
        return max(len(self._part_range(part)) for part in range(len(self._parts)))

    def order(self, epoch: int) -> Tensor:
        """Sample indices of one epoch in training order (num_samples,), int64; part after part if workers own them."""
        return self._epoch(epoch)[0]

    def indices(self, batch_number: int) -> Tensor:
        """Sample indices of a batch (batch_size or fewer,), int64."""
        epoch, index = divmod(batch_number, self.batches_per_epoch)
        return self._epoch(epoch)[1][index]

    def size(self, batch_number: int) -> int:
        """Samples of a batch: `len(indices(batch_number))`, without an order being drawn."""
        return self._sizes[batch_number % self.batches_per_epoch]

    def _epoch(self, epoch: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """An epoch's order, and the same cut into batches: cut once, a batch costs no slicing in the training loop."""
        recent = self._orders["recent"]
        for known, order, batches in recent:
            if known == epoch:
                return order, batches
        parts = [self._shuffled(part, epoch, index) for index, part in enumerate(self._parts)]
        batches = tuple(
            batch for part in parts for batch in part.split(self.batch_size)[: self._num_batches(len(part))]
        )
        order = torch.cat(parts)
        # Two epochs, since near the end of one, some workers are already in the next. One assignment: threads may race.
        self._orders["recent"] = ((epoch, order, batches), *recent[:1])
        return order, batches

    def worker_batches(self, worker_id: int, epoch: int) -> range:
        """Numbers of the batches that a worker owns in an epoch, for `Fixed` and `Skewed`."""
        if isinstance(self.partition, Dynamic):
            raise UsageError("Under the dynamic partition no worker owns batches; use the shared counter or 'fixed'.")
        self._check_worker(worker_id, self.num_workers)
        owned, offset = self._part_range(worker_id), epoch * self.batches_per_epoch
        return range(offset + owned.start, offset + owned.stop)

    def round_batch(self, round: int, worker_id: int, num_workers: int | None = None) -> int | None:
        """Number of the batch that a worker takes in a lockstep round; None if none is left for it in that epoch.

        A worker without a batch takes part in the round and weighs zero, so that no sample is seen twice in an epoch.

        Args:
            round: counted from 0 over the whole run; `rounds_per_epoch` of them make an epoch.
            worker_id: from 0.
            num_workers: workers in the round; the plan's own number if None.
        """
        num_workers = num_workers or self.num_workers
        self._check_worker(worker_id, num_workers)
        epoch, index = divmod(round, self.rounds_per_epoch(num_workers))
        if isinstance(self.partition, Dynamic):
            index = index * num_workers + worker_id
            return epoch * self.batches_per_epoch + index if index < self.batches_per_epoch else None
        if num_workers != self.num_workers:
            raise UsageError(f"This plan divides the samples among {self.num_workers} workers, not {num_workers}.")
        owned = self.worker_batches(worker_id, epoch)
        return owned[index] if index < len(owned) else None

    def _num_batches(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _part_range(self, part: int) -> range:
        return range(self._first_batches[part], self._first_batches[part + 1])

    def _shuffled(self, part: Tensor, epoch: int, index: int) -> Tensor:
        if not self.shuffle:
            return part
        return part[torch.randperm(len(part), generator=_generator(self.seed, epoch, index))]

    @staticmethod
    def _check_worker(worker_id: int, num_workers: int) -> None:
        if not 0 <= worker_id < num_workers:
            raise UsageError(f"worker_id {worker_id} does not exist; {num_workers} workers count from 0.")


def _generator(*seed: int) -> torch.Generator:
    """A generator whose stream depends on every number of the seed; sums would repeat (0, 1) as (1, 0)."""
    return torch.Generator().manual_seed(derived_seed(*seed))


def derived_seed(*seed: int) -> int:
    """A seed that depends on every number."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _parts(plan: BatchPlan) -> tuple[Tensor, ...]:
    """The sample indices that each worker owns; one part for all under `Dynamic`."""
    if isinstance(plan.partition, Dynamic):
        return (torch.arange(plan.num_samples),)
    if plan.num_samples < plan.num_workers:
        raise UsageError(
            f"{plan.num_samples} samples cannot give each of {plan.num_workers} workers a part; use fewer."
        )
    if isinstance(plan.partition, Skewed):
        return _skewed_parts(plan, plan.partition.alpha)
    samples = torch.arange(plan.num_samples)
    if plan.shuffle:
        samples = samples[torch.randperm(plan.num_samples, generator=_generator(plan.seed, 2**32 - 1))]
    return samples.tensor_split(plan.num_workers)


def _skewed_parts(plan: BatchPlan, alpha: float) -> tuple[Tensor, ...]:
    if plan.labels is None or plan.labels.shape != (plan.num_samples,):
        raise UsageError("The skewed partition needs one class label per sample; use 'fixed' for data without labels.")
    random = np.random.default_rng([plan.seed, 2**32 - 2])
    labels = plan.labels.numpy()
    owned: list[list[int]] = [[] for _ in range(plan.num_workers)]
    for label in np.unique(labels):
        samples = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(plan.num_workers, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(int)
        for worker_id, share in enumerate(np.split(samples, cuts)):
            owned[worker_id].extend(share.tolist())
    for samples in owned:
        if not samples:
            samples.append(max(owned, key=len).pop())
    return tuple(torch.tensor(sorted(samples)) for samples in owned)


def length_of(batch: Any) -> int:
    """Length of the first tensor in a batch, however nested; 0 if there is none."""
    if type(batch) is tuple and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].shape[0]
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        return length_of(next(iter(batch.values()), None))
    if isinstance(batch, list | tuple) and batch:
        return length_of(batch[0])
    return 0


class BatchSource(Protocol):
    """Hands a worker its batches."""

    def next(self) -> Any | None:
        """The next batch, or None at the end."""
        ...
