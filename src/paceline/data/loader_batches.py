"""A user's loader as batches that workers can share: in a plan's order, or as its own sampler draws them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.data.batches import LoaderBatches
from paceline.data.drawn_batches import DrawnBatches, DrawnShares, fetcher
from paceline.data.plan import BatchPlan
from paceline.data.same_data import (
    UNKNOWN,
    Fingerprint,
    at_four_places,
    compared_length,
    digest_of_all,
    digests,
    name_of,
    sample_digests,
)
from paceline.data.wrappers import device_of, unwrapped_loader
from paceline.errors import UsageError
from paceline.ports.round_shares import RoundShares


class PlannedBatches(LoaderBatches):
    """Batches in the order of a `BatchPlan`."""

    def __init__(
        self, loader: Any, plan: BatchPlan, fetch: Callable[[list[int]], Any], shares: RoundShares | None = None
    ) -> None:
        self.loader = loader
        self.shares = shares
        self.key = (plan.num_samples, plan.batch_size)
        self.epoch_numbers = plan.batches_per_epoch
        self.length = self.epoch_numbers
        self._plan = plan
        self._fetch = fetch
        self._first = 0
        self._data: Any = loader.dataset if isinstance(loader, DataLoader) else loader

    def begin(self, epoch: int, unmet: Collection[int] = ()) -> int:
        """As in `LoaderBatches`; raises `UsageError` if the data have become more or fewer since the first epoch."""
        before, now = self._plan.num_samples, len(self._data)
        if now != before:
            raise UsageError(
                f"The {type(self._data).__name__} that worker.batches takes its data from had {before:,} elements and now has"
                f" {now:,}, but every epoch has the same: give a DataLoader a sampler of your own, whose epochs may differ."
            )
        self._first = epoch * self.epoch_numbers
        return epoch

    def fingerprint(self, *, in_processes: bool) -> Fingerprint:
        indices, seed = at_four_places(range(self._plan.num_samples)), self._plan.seed
        if isinstance(self.loader, DataLoader):
            samples = sample_digests(self.loader, indices, seed, in_processes=in_processes)
        else:
            samples = digests(self.loader.__getitem__, indices, seed)
        of_all = digest_of_all(self.loader) if isinstance(self.loader, list | tuple) else UNKNOWN
        return Fingerprint(
            type(self.loader).__name__, [compared_length(self.length), of_all, *samples], is_list=of_all != UNKNOWN
        )

    def has(self, place: int) -> bool:
        return place < self.epoch_numbers

    def indices(self, place: int) -> list[int]:
        return self._plan.indices(self._first + place, self.shares).tolist()

    def samples(self, place: int) -> int:
        return self._plan.size(place) if isinstance(self.loader, DataLoader) else 0

    def fetch(self, place: int) -> Any:
        return self._fetch(self.indices(place))


def shared_batches(loader: Iterable[Any], seed: int, shares: RoundShares | None = None) -> LoaderBatches | None:
    """The loader's batches one by one; None if it can only be iterated.

    `shares` deals the samples of a round of batches; None: each batch goes to one worker.

    Raises:
        UsageError: it has no batch, or its batches cannot be shared; the message names the reason.
    """
    plain = unwrapped_loader(loader)
    if isinstance(plain, DataLoader):
        batches = _of_data_loader(plain, seed, shares)
        if batches is not None:
            batches.device = device_of(loader)
        return batches
    if isinstance(loader, Sequence):
        if not len(loader):
            raise UsageError(
                f"worker.batches was given an empty {type(loader).__name__}, so there is nothing to train on: check "
                "the code that fills it."
            )
        if shares is not None:
            raise cannot_be_cut(f"a {type(loader).__name__} of batches")
        plan = BatchPlan(num_samples=len(loader), batch_size=1, seed=seed, shuffle=False)
        return PlannedBatches(loader, plan, lambda indices: loader[indices[0]])
    return None


def _of_data_loader(loader: DataLoader[Any], seed: int, shares: RoundShares | None) -> LoaderBatches | None:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        _refuse_parts(dataset)
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        return None
    outer: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if name_of(outer) == "BatchSamplerShard":  # Accelerate's
        if _number(outer, "num_processes") > 1:
            _warn_of_parts(outer)
        outer = outer.batch_sampler
    inner, is_plain = loader.sampler, type(outer) is BatchSampler
    if is_plain:
        inner = outer.sampler
    elif shares is not None:
        raise cannot_be_cut("a DataLoader without batch_size" if loader.batch_sampler is None else name_of(outer))
    if is_plain and isinstance(inner, DistributedSampler):
        _warn_of_parts(inner)
        return _planned(loader, outer, seed, shares, shuffle=inner.shuffle)
    _refuse_parts(outer)
    _refuse_parts(inner)
    if is_plain and _is_in_order(inner, dataset):
        shuffle = _is_random(inner)
        return _planned(loader, outer, seed, shares, shuffle=shuffle)
    if shares is not None:
        return DrawnShares(loader, outer, seed, shares)
    return DrawnBatches(loader, outer, seed)


def cannot_be_cut(what: str) -> UsageError:
    """The error for batches that `shares=auto` cannot divide."""
    return UsageError(
        f"shares=auto divides each round's samples by the workers' speeds, but cannot divide the batches of {what}: "
        "give worker.batches a DataLoader with a batch_size, with any sampler, or leave out shares."
    )


def _warn_of_parts(sampler: Any) -> None:
    warnings.warn(
        f"{name_of(sampler)} was ignored, because worker.batches already divides the whole data set among the "
        "workers. Leave it out.",
        stacklevel=2,
    )


def _refuse_parts(one: Any) -> None:
    if max(_number(one, "num_replicas"), _number(one, "num_processes")) > 1:
        raise UsageError(
            f"Both {name_of(one)} and worker.batches divide the data among the workers: leave out {name_of(one)}, or "
            "write worker.batches(loader, own=True)."
        )


def _is_in_order(sampler: Any, dataset: Any) -> bool:
    """Whether it is one of the two usual samplers, over the whole data set, each sample once."""
    if _is_random(sampler) and (sampler.replacement or sampler.num_samples != len(dataset)):
        return False
    return (_is_random(sampler) or type(sampler) is SequentialSampler) and len(sampler.data_source) == len(dataset)


def _is_random(sampler: Any) -> bool:
    """Also Accelerate's, which differs in how it is seeded."""
    return type(sampler) is RandomSampler or (
        isinstance(sampler, RandomSampler) and name_of(sampler) == "SeedableRandomSampler"
    )


def _planned(
    loader: DataLoader[Any], sampler: BatchSampler, seed: int, shares: RoundShares | None, *, shuffle: bool
) -> PlannedBatches:
    dataset: Any = loader.dataset
    if not len(dataset):
        raise UsageError("worker.batches was given a DataLoader of an empty data set, so there is nothing to train on.")
    plan = BatchPlan(
        num_samples=len(dataset),
        batch_size=sampler.batch_size,
        seed=seed,
        shuffle=shuffle,
        num_workers=shares.num_workers if shares is not None else 1,
        drop_last=sampler.drop_last,
        by_speed=shares is not None,
    )
    if shares is not None:
        shares.know_batch_size(plan.batch_size)
    return PlannedBatches(loader, plan, fetcher(loader), shares)


def _number(sampler: Any, name: str) -> int:
    value = getattr(sampler, name, 1)
    return value if isinstance(value, int) else 1
