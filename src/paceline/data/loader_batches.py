"""A user's loader as batches that workers can share: in a plan's order, or as its own sampler draws them."""

from __future__ import annotations

import contextlib
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.data.plan import BatchPlan, derived_seed
from paceline.data.wrappers import device_of, unwrapped_loader
from paceline.errors import UsageError
from paceline.system.global_randomness import SeparateRandomness

__all__ = ["DrawnBatches", "LoaderBatches", "PlannedBatches", "shared_batches"]

_DRAWN_AT_ONCE = 1024  # more than that are drawn when they are asked for: some samplers never end
_DRAWN_EPOCH = 1 << 32  # numbers from one drawn epoch to the next, which may have another length
_drawing = threading.Lock()  # worker threads share the global generators


class LoaderBatches(Protocol):
    """The batches of a loader, epoch after epoch, the same on every worker.

    Attributes:
        loader: the user's.
        key: equal for loaders that have the same batches.
        length: batches in an epoch; None: not known before it ends.
        epoch_numbers: from an epoch's first batch number to the next one's.
        device: where batches are brought; None: they stay where they were made.
    """

    loader: Any
    key: object
    length: int | None
    epoch_numbers: int
    device: torch.device | None

    def begin(self, epoch: int) -> None:
        """Draws the epoch's order; called for each epoch, one after the other."""
        ...

    def has(self, place: int) -> bool:
        """Whether the epoch that has begun has so many batches and one more."""
        ...

    def indices(self, place: int) -> Any:
        """What the loader's sampler yields for that batch."""
        ...

    def samples(self, place: int) -> int:
        """How many that batch has, without its being fetched; 0: nobody knows."""
        ...

    def fetch(self, place: int) -> Any:
        """The batch itself."""
        ...


class PlannedBatches:
    """Batches in the order of a `BatchPlan`.

    Args:
        loader: the user's.
        plan: its epochs.
        fetch: makes a batch of sample indices.
    """

    def __init__(self, loader: Any, plan: BatchPlan, fetch: Callable[[list[int]], Any]) -> None:
        self.loader = loader
        self.device: torch.device | None = None
        self.key: object = (plan.num_samples, plan.batch_size)
        self.epoch_numbers = plan.batches_per_epoch
        self.length: int | None = self.epoch_numbers
        self._plan = plan
        self._fetch = fetch
        self._first = 0

    def begin(self, epoch: int) -> None:
        """Orders are drawn when they are needed."""
        self._first = epoch * self.epoch_numbers

    def has(self, place: int) -> bool:
        """Whether the epoch has this batch."""
        return place < self.epoch_numbers

    def indices(self, place: int) -> list[int]:
        """Indices of its samples."""
        return self._plan.indices(self._first + place).tolist()

    def samples(self, place: int) -> int:
        """How many it has, where the loader makes batches of samples."""
        return self._plan.size(place) if isinstance(self.loader, DataLoader) else 0

    def fetch(self, place: int) -> Any:
        """The batch itself."""
        return self._fetch(self.indices(place))


class DrawnBatches:
    """Batches as the loader's own sampler or batch sampler draws them.

    Every worker draws for itself, each epoch from generators that are seeded alike: Python's, NumPy's and torch's, and those
    that samplers keep as `generator`. So a worker that is replaced, or a run that is resumed, needs no other worker to know an
    epoch's order. What samplers draw from elsewhere has to be equal on all workers; the first epoch's first batches are
    compared.

    Costs: each worker draws the whole order, 1,024 batches at a time. Epochs may differ in length: their numbers leave room.

    Args:
        loader: the user's.
        sampler: yields what each batch is fetched by.
        seed: the run's.
        agree: maps this worker's digest of an order to the first worker's.

    Raises:
        UsageError: another worker has drawn another order.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Iterable[Any], seed: int, agree: Callable[[int], int]) -> None:
        self.loader = loader
        self.device: torch.device | None = None
        self.key: object = "drawn"
        self.length: int | None = None
        self.epoch_numbers = _DRAWN_EPOCH
        self._sampler = sampler
        self._seed = seed
        self._agree = agree
        self._fetch = fetcher(loader)
        self._drawn: list[Any] = []
        self._order: Iterator[Any] | None = None
        self._randomness = SeparateRandomness(0)
        with contextlib.suppress(TypeError, NotImplementedError):
            self.length = len(sampler)  # type: ignore[arg-type]

    def begin(self, epoch: int) -> None:
        """Begins to draw anew."""
        self._randomness = SeparateRandomness(derived_seed(self._seed, epoch))
        self._drawn, self._order = [], None
        self._draw()
        if not epoch:
            digest = 1 + zlib.crc32(repr(self._drawn).encode())
            if self._agree(digest) != digest:
                raise UsageError(
                    f"{_name(self._sampler)} draws another order on each worker, so they cannot share its batches: let it draw"
                    " from torch's, NumPy's or Python's global generator, or from one with the same seed on all workers."
                )

    def _draw(self) -> None:
        with _drawing, self._randomness, _own_generators(self._sampler, self._randomness.generator):
            self._order = iter(self._sampler) if self._order is None else self._order
            self._drawn += map(_as_data, islice(self._order, _DRAWN_AT_ONCE))

    def has(self, place: int) -> bool:
        """Whether the epoch has this batch."""
        while place >= (before := len(self._drawn)):
            self._draw()
            if len(self._drawn) == before:
                return False
        return True

    def indices(self, place: int) -> Any:
        """What was drawn."""
        return self._drawn[place]

    def samples(self, place: int) -> int:
        """As many as were drawn for it."""
        drawn = self._drawn[place]
        return len(drawn) if isinstance(drawn, Sequence) else 0

    def fetch(self, place: int) -> Any:
        """The batch itself."""
        return self._fetch(self._drawn[place])


def shared_batches(loader: Iterable[Any], seed: int, agree: Callable[[int], int]) -> LoaderBatches | None:
    """The loader's batches one by one; None where it can only be iterated.

    Raises:
        UsageError: it has no batch, or its batches cannot be shared; the message names what stands in the way.
    """
    plain = unwrapped_loader(loader)
    if isinstance(plain, DataLoader):
        batches = _of_data_loader(plain, seed, agree)
        if batches is not None:
            batches.device = device_of(loader)
        return batches
    if isinstance(loader, Sequence):
        if not len(loader):
            raise UsageError(
                f"worker.batches was given an empty {type(loader).__name__}, so there is nothing to train on: see what should"
                " have filled it."
            )
        plan = BatchPlan(num_samples=len(loader), batch_size=1, seed=seed, shuffle=False)
        return PlannedBatches(loader, plan, lambda indices: loader[indices[0]])
    return None


def _of_data_loader(loader: DataLoader[Any], seed: int, agree: Callable[[int], int]) -> LoaderBatches | None:
    dataset: Any = loader.dataset
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, and worker.batches fetches batches without it: give it a"
            " plain DataLoader, and do in the loop what __iter__ does to a batch."
        )
    if isinstance(dataset, IterableDataset):
        _refuse_parts(dataset)
        return None
    outer: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if _name(outer) == "BatchSamplerShard":  # Accelerate's
        if _number(outer, "num_processes") > 1:
            _warn_of_parts(outer)
        outer = outer.batch_sampler
    inner, is_plain = loader.sampler, type(outer) is BatchSampler
    if is_plain:
        inner = outer.sampler
    if is_plain and isinstance(inner, DistributedSampler):
        _warn_of_parts(inner)
        return _planned(loader, outer.batch_size, seed, shuffle=inner.shuffle, drop_last=outer.drop_last)
    _refuse_parts(outer)
    _refuse_parts(inner)
    if is_plain and _is_in_order(inner, dataset):
        shuffle = _is_random(inner)
        return _planned(loader, outer.batch_size, seed, shuffle=shuffle, drop_last=outer.drop_last)
    return DrawnBatches(loader, outer, seed, agree)


def _warn_of_parts(sampler: Any) -> None:
    warnings.warn(
        f"{_name(sampler)} would leave each worker a part of its part: worker.batches shares the whole data set by itself, so"
        " it was ignored. Leave it out.",
        stacklevel=2,
    )


def _refuse_parts(one: Any) -> None:
    if max(_number(one, "num_replicas"), _number(one, "num_processes")) > 1:
        raise UsageError(
            f"{_name(one)} gives each worker a part of its own, and so does worker.batches: leave {_name(one)} out, as the"
            " workers share the whole data set."
        )


def _is_in_order(sampler: Any, dataset: Any) -> bool:
    """Whether it is one of the two usual samplers, over the whole data set, each sample once."""
    if _is_random(sampler) and (sampler.replacement or sampler.num_samples != len(dataset)):
        return False
    return (_is_random(sampler) or type(sampler) is SequentialSampler) and len(sampler.data_source) == len(dataset)


def _is_random(sampler: Any) -> bool:
    """Also Accelerate's, which differs in how it is seeded."""
    return type(sampler) is RandomSampler or (
        isinstance(sampler, RandomSampler) and _name(sampler) == "SeedableRandomSampler"
    )


def _planned(loader: DataLoader[Any], batch_size: int, seed: int, *, shuffle: bool, drop_last: bool) -> PlannedBatches:
    dataset: Any = loader.dataset
    if not len(dataset):
        raise UsageError("worker.batches was given a DataLoader of an empty data set, so there is nothing to train on.")
    plan = BatchPlan(num_samples=len(dataset), batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    return PlannedBatches(loader, plan, fetcher(loader))


def fetcher(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Fetches as the loader does, in this process."""
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    if loader.batch_sampler is None:
        return lambda index: collate(dataset[index])
    if hasattr(dataset, "__getitems__"):
        return lambda indices: collate(dataset.__getitems__(indices))
    return lambda indices: collate([dataset[index] for index in indices])


class _own_generators:  # noqa: N801  (used like a function)
    """Lets samplers that have an attribute `generator` draw from this one meanwhile."""

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self._generator = generator
        self._before: list[tuple[Any, Any]] = []
        while sampler is not None:
            if isinstance(getattr(sampler, "generator", self), torch.Generator | None):
                self._before.append((sampler, sampler.generator))
            sampler = getattr(sampler, "sampler", None)

    def __enter__(self) -> None:
        for sampler, _ in self._before:
            sampler.generator = self._generator

    def __exit__(self, *exception: object) -> None:
        for sampler, before in self._before:
            sampler.generator = before


def _as_data(drawn: Any) -> Any:
    """What lasts: samplers may reuse their lists, and orders are compared as text."""
    return list(drawn) if isinstance(drawn, list | tuple) else drawn


def _number(sampler: Any, name: str) -> int:
    value = getattr(sampler, name, 1)
    return value if isinstance(value, int) else 1


def _name(sampler: Any) -> str:
    name = type(sampler).__name__
    return f"{name} of {_name(sampler.sampler)}" if type(sampler) is BatchSampler else name
