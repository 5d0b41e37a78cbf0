"""The samples of each batch and worker: an epoch has each sample once, for any number of workers.

Pure functions of a seed: no torch.distributed, no shared memory, no global generator. Batches carry one number for the
whole run, `epoch * batches_per_epoch + index`, so that a batch can be named in an event, a message or a checkpoint.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.ports.round_shares import RoundShares, divided
from paceline.specs.bounds import ABOVE_0
from paceline.specs.registry import Registry
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Base class of the ways to divide the samples among workers."""

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
    """Each worker owns a part with its own mix of labels, as when data stay at their source.

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
    lockstep, its place in the round. Under `Fixed` and `Skewed` an epoch's numbers are first worker 0's batches, then worker
    1's: `worker_batches`.
    """

    num_samples: int  # samples in the data set
    batch_size: int  # samples per batch; the last batch of an epoch (or of a part) may be shorter
    seed: int = 0  # of the permutations and of the parts, 0 or more
    shuffle: bool = True  # reshuffle each epoch; otherwise samples keep the data set's order
    partition: Partition = field(default_factory=Dynamic)  # how the workers share the samples
    num_workers: int = 1  # workers; `Dynamic` batches do not depend on it
    drop_last: bool = False  # leave out the short last batch of an epoch (of a part)
    # Class of each sample (num_samples,), for `Skewed` only.
    labels: Tensor | None = field(default=None, repr=False, compare=False)
    # Batches form rounds of `num_workers`, and `share` divides each round's samples by speed, including an epoch's last
    # round, so that all workers have a part of it.
    by_speed: bool = False
    _parts: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    _first_batches: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _recent: list[tuple[tuple[int, Tensor, tuple[Tensor, ...]], ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("batch_size", 1), ("num_workers", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be {least} or more, not {getattr(self, name)}.")
        if self.by_speed and not isinstance(self.partition, Dynamic):
            spec = partition_registry.spec(self.partition)
            raise UsageError(
                f"shares=auto divides each round's samples by the workers' speeds, but the {spec} partition gives "
                "each worker its own samples: use the dynamic partition, or leave out shares."
            )
        parts = _parts(self)
        cuts = [self._cut(len(part)) for part in parts]
        counts = [len(sizes) for sizes in cuts]
        if min(counts) == 0:
            raise UsageError(
                f"batch_size {self.batch_size} with drop_last leaves a part of {min(map(len, parts))} samples "
                "without a batch; lower batch_size or keep the last batch."
            )
        firsts = tuple(int(first) for first in np.cumsum([0, *counts]))
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_first_batches", firsts)
        object.__setattr__(self, "_recent", [()] * len(parts))
        object.__setattr__(self, "_sizes", tuple(size for sizes in cuts for size in sizes))

    @property
    def batches_per_epoch(self) -> int:
        return self._first_batches[-1]

    def num_batches_for(self, epochs: float) -> int:
        """Batches in this many epochs, over all workers; fractions round up to whole batches.

        >>> BatchPlan(num_samples=100, batch_size=10).num_batches_for(0.25)
        3
        """
        return math.ceil(round(epochs * self.batches_per_epoch, 6))

    def rounds_per_epoch(self) -> int:
        """Lockstep rounds in one epoch; the last rounds may lack some workers."""
        if len(self._parts) == 1:
            return -(-self.batches_per_epoch // self.num_workers)
        return max(len(self._part_range(part)) for part in range(len(self._parts)))

    def order(self, epoch: int) -> Tensor:
        """Sample indices of one epoch in training order (num_samples,), int64; part after part if workers own them."""
        orders = [self._part_order(part, epoch)[0] for part in range(len(self._parts))]
        return orders[0] if len(orders) == 1 else torch.cat(orders)

    def indices(self, batch_number: int, shares: RoundShares | None = None) -> Tensor:
        """Sample indices of a batch (batch_size or fewer,), int64; with `shares`, of its part of the round's samples."""
        epoch, index = divmod(batch_number, self.batches_per_epoch)
        if shares is not None:
            samples = self._part_of(batch_number, shares)
            return self.order(epoch)[samples.start : samples.stop]
        part = bisect.bisect_right(self._first_batches, index) - 1
        return self._part_order(part, epoch)[1][index - self._first_batches[part]]

    def size(self, batch_number: int, shares: RoundShares | None = None) -> int:
        """Samples of a batch: `len(indices(batch_number, shares))`, without drawing an order."""
        if shares is not None:
            return len(self._part_of(batch_number, shares))
        return self._sizes[batch_number % len(self._sizes)]

    def _part_order(self, part: int, epoch: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A part's order in an epoch, and its batches, which are cut once to save a slice in each training step."""
        recent = self._recent[part]
        for known, order, batches in recent:
            if known == epoch:
                return order, batches
        order = self._parts[part]
        if self.shuffle:
            order = order[torch.randperm(len(order), generator=_generator(self.seed, epoch, part))]
        sizes = self._cut(len(order))
        batches = order[: sum(sizes)].split(sizes)
        # Kept per part, because workers may be in different epochs. Two epochs are kept, because some of the workers that
        # share a part may be in the next one already. A single assignment, because threads may race.
        self._recent[part] = ((epoch, order, batches), *recent[:1])
        return order, batches

    def worker_batches(self, worker_id: int, epoch: int) -> range:
        """Numbers of the batches that a worker owns in an epoch, for `Fixed` and `Skewed`."""
        if isinstance(self.partition, Dynamic):
            raise UsageError("Under the dynamic partition no worker owns batches; use the shared counter or 'fixed'.")
        if not 0 <= worker_id < self.num_workers:
            raise UsageError(
                f"worker_id {worker_id} does not exist: there are {self.num_workers} workers, numbered from 0."
            )
        owned, offset = self._part_range(worker_id), epoch * self.batches_per_epoch
        return range(offset + owned.start, offset + owned.stop)

    def _part_of(self, batch_number: int, shares: RoundShares) -> range:
        """Positions of a batch's samples in the epoch's order, if rounds are divided by the workers' speeds."""
        epoch, index = divmod(batch_number, self.batches_per_epoch)
        first = index - index % self.num_workers
        samples = sum(self._sizes[first : first + self.num_workers])
        part = shares.part(shares.round_of(epoch, self.batches_per_epoch, index), samples, index)
        begin = first * self.batch_size
        return range(begin + part.start, begin + part.stop)

    def _cut(self, samples: int) -> list[int]:
        """Sizes of the batches in a part with this many samples."""
        whole, rest = divmod(samples, self.batch_size)
        sizes = [self.batch_size] * whole + [rest] * (rest > 0 and not self.drop_last)
        if self.by_speed and sizes:
            first = (len(sizes) - 1) // self.num_workers * self.num_workers
            sizes[first:] = filter(None, divided(sum(sizes[first:]), (1,) * self.num_workers))
        return sizes

    def _part_range(self, part: int) -> range:
        return range(self._first_batches[part], self._first_batches[part + 1])


def _generator(*seed: int) -> torch.Generator:
    """A generator whose stream depends on every number of the seed; with a sum, (0, 1) and (1, 0) would be equal."""
    return torch.Generator().manual_seed(derived_seed(*seed))


def derived_seed(*seed: int) -> int:
    """A seed that depends on all of the numbers."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _parts(plan: BatchPlan) -> tuple[Tensor, ...]:
    """The sample indices that each worker owns; one part for all under `Dynamic`."""
    if isinstance(plan.partition, Dynamic):
        return (torch.arange(plan.num_samples),)
    if plan.num_samples < plan.num_workers:
        raise UsageError(
            f"{plan.num_samples} samples are too few to give each of {plan.num_workers} workers a part; use fewer "
            "workers."
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
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].size(0)
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return 0
    return next(filter(None, map(length_of, batch)), 0)


def samples_in(batch: Any, batch_size: object) -> int:
    """Number of samples in a batch: `batch_size` if any part has that length, else the length of the first tensor."""
    return batch_size if isinstance(batch_size, int) and _has_length(batch, batch_size) else length_of(batch)


def _has_length(batch: Any, length: int) -> bool:
    if isinstance(batch, torch.Tensor):
        return batch.dim() > 0 and len(batch) == length
    if isinstance(batch, Mapping):
        return any(_has_length(one, length) for one in batch.values())
    return isinstance(batch, list | tuple) and (len(batch) == length or any(_has_length(one, length) for one in batch))


class BatchSource(Protocol):
    """Hands a worker its batches."""

    def next(self) -> Any | None:
        """The next batch, or None at the end."""
        ...
