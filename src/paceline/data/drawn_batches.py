"""Batches in the order of a loader's own sampler."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.batches import DRAWN_EPOCH, LoaderBatches
from paceline.data.plan import derived_seed
from paceline.data.same_data import MASK, Fingerprint, at_four_places, compared_length, name_of, sample_digests
from paceline.ports.round_shares import RoundShares, divided, num_parts
from paceline.system.global_randomness import SeparateRandomness

_DRAWN_AT_ONCE = 1024  # more are drawn only when needed: some samplers never end


class DrawnBatches(LoaderBatches):
    """Batches in the order of the loader's own sampler or batch sampler.

    Every worker draws the order itself, each epoch from equally seeded generators: Python's, NumPy's and torch's, and the
    `generator` of samplers. So a replaced worker, or a resumed run, can reproduce an epoch's order alone. Workers compare
    their orders, which differ if they are drawn from other sources.

    Each worker draws the whole order, 1,024 batches at a time. Epochs can differ in length.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Iterable[Any], seed: int) -> None:
        self.loader = loader
        self._sampler = sampler
        self._seed = seed
        self._is_batched = loader.batch_sampler is not None
        self._fetch = fetcher(loader)
        self._drawn: list[Any] = []
        self._epoch = 0
        self._order: Iterator[Any] | None = None
        self._randomness = SeparateRandomness(0)
        with contextlib.suppress(TypeError, NotImplementedError):
            self.length = len(sampler)  # type: ignore[arg-type]

    def begin(self, epoch: int, unmet: Collection[int] = ()) -> int:
        shift = (epoch - self._epoch) * DRAWN_EPOCH
        self.earlier = {place - shift: self.indices(place) for place in unmet}
        self._epoch = epoch
        self._randomness = SeparateRandomness(derived_seed(self._seed, epoch))
        self._drawn, self._order = [], None
        self._draw()
        return epoch

    def fingerprint(self, *, in_processes: bool) -> Fingerprint:
        drawn = self._drawn[:_DRAWN_AT_ONCE]
        indices = [
            one[0] if isinstance(one, list) and one and self._is_batched else one for one in at_four_places(drawn)
        ]
        samples = sample_digests(self.loader, indices, self._seed, in_processes=in_processes)
        numbers = compared_length(self.length), 1 + zlib.crc32(repr(drawn).encode()) % MASK, *samples
        return Fingerprint(name_of(self._sampler), numbers)

    def _draw(self) -> None:
        with self._randomness, _own_generators(self._sampler, self._randomness.generator):
            self._order = iter(self._sampler) if self._order is None else self._order
            self._drawn += map(_as_data, islice(self._order, _DRAWN_AT_ONCE))

    def has(self, place: int) -> bool:
        while place >= (before := len(self._drawn)):
            self._draw()
            if len(self._drawn) == before:
                return False
        return True

    def indices(self, place: int) -> Any:
        return self._drawn[place] if place >= 0 else self.earlier[place]

    def samples(self, place: int) -> int:
        drawn = self.indices(place)
        return len(drawn) if isinstance(drawn, Sequence) else 0

    def fetch(self, place: int) -> Any:
        return self._fetch(self.indices(place))


class DrawnShares(DrawnBatches):
    """Rounds of drawn batches, whose samples are divided by the workers' speeds."""

    def __init__(self, loader: DataLoader[Any], sampler: BatchSampler, seed: int, shares: RoundShares) -> None:
        super().__init__(loader, sampler, seed)
        shares.know_batch_size(sampler.batch_size)
        self.shares, self._round_shares = shares, shares
        self._num_workers = shares.num_workers
        self._round: tuple[int, list[Any]] = (-1, [])  # and its samples
        if self.length is not None:
            samples, size = len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
            samples -= samples % size if sampler.drop_last else 0
            self.length = num_parts(samples, size, self._num_workers)

    def begin(self, epoch: int, unmet: Collection[int] = ()) -> int:
        begun = super().begin(epoch, unmet)
        self._round = (-1, [])
        return begun

    def has(self, place: int) -> bool:
        round, worker_id = divmod(place, self._num_workers)
        return place < 0 or worker_id < len(self._drawn_for(round))

    def indices(self, place: int) -> list[Any]:
        if place < 0:
            return self.earlier[place]
        drawn = self._drawn_for(place // self._num_workers)
        shares = self._round_shares
        part = shares.part(shares.round_of(self._epoch, self.epoch_numbers, place), len(drawn), place)
        return drawn[part.start : part.stop]

    def samples(self, place: int) -> int:
        """The number of samples if all workers are equally fast."""
        if place < 0:
            return len(self.earlier[place])
        round, worker_id = divmod(place, self._num_workers)
        return divided(len(self._drawn_for(round)), (1,) * self._num_workers)[worker_id]

    def _drawn_for(self, round: int) -> list[Any]:
        if self._round[0] != round:
            first, end = round * self._num_workers, (round + 1) * self._num_workers
            super().has(end - 1)
            self._round = round, [one for batch in self._drawn[first:end] for one in batch]
        return self._round[1]


def fetcher(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Returns a function that fetches a batch as the loader does, in this process."""
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    if loader.batch_sampler is None:
        return lambda index: collate(dataset[index])
    if hasattr(dataset, "__getitems__"):
        return lambda indices: collate(dataset.__getitems__(indices))
    return lambda indices: collate([dataset[index] for index in indices])


@contextlib.contextmanager
def _own_generators(sampler: Any, generator: torch.Generator) -> Iterator[None]:
    """Temporarily replaces the `generator` of a sampler, and of those within it, that have one."""
    before: list[tuple[Any, Any]] = []
    while sampler is not None:
        if isinstance(getattr(sampler, "generator", ""), torch.Generator | None):
            before.append((sampler, sampler.generator))
        sampler = getattr(sampler, "sampler", None)
    for one, _ in before:
        one.generator = generator
    try:
        yield
    finally:
        for one, own in before:
            one.generator = own


def _as_data(drawn: Any) -> Any:
    """A copy, because samplers may reuse their lists; orders are compared as text."""
    return list(drawn) if isinstance(drawn, list | tuple) else drawn
