"""A loader's batches as its own sampler draws them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.plan import derived_seed
from paceline.data.same_data import MASK, Fingerprint, at_four_places, compared_length, name_of, sample_digests
from paceline.ports.round_shares import RoundShares, divided, num_parts
from paceline.system.global_randomness import SeparateRandomness

_DRAWN_AT_ONCE = 1024  # more than that are drawn when they are asked for: some samplers never end
DRAWN_EPOCH = 1 << 32  # numbers from one drawn epoch to the next, which may have another length


class DrawnBatches:
    """Batches as the loader's own sampler or batch sampler draws them.

    Every worker draws the order itself, each epoch from equally seeded generators: Python's, NumPy's and torch's, and those
    that samplers keep as `generator`. So a replaced worker, or a resumed run, can reproduce an epoch's order alone. Orders
    drawn from other sources must be equal on all workers, which compare them.

    Costs: each worker draws the whole order, 1,024 batches at a time. Epochs can differ in length: their numbers leave room.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Iterable[Any], seed: int) -> None:
        self.loader = loader
        self.shares: RoundShares | None = None
        self.device: torch.device | None = None
        self.can_repeat = True
        self.key: object = "drawn"
        self.length: int | None = None
        self.epoch_numbers = DRAWN_EPOCH
        self._sampler = sampler
        self._seed = seed
        self._is_batched = loader.batch_sampler is not None
        self._fetch = fetcher(loader)
        self._drawn: list[Any] = []
        self.earlier: dict[int, Any] = {}
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

    def _at(self, place: int) -> Any:
        return self._drawn[place] if place >= 0 else self.earlier[place]

    def indices(self, place: int) -> Any:
        return self._at(place)

    def samples(self, place: int) -> int:
        drawn = self._at(place)
        return len(drawn) if isinstance(drawn, Sequence) else 0

    def fetch(self, place: int) -> Any:
        return self._fetch(self._at(place))


class DrawnShares(DrawnBatches):
    """Rounds of drawn batches, whose samples are divided by the workers' speeds."""

    length: int | None
    shares: RoundShares | None

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
        """For equally fast workers."""
        if place < 0:
            return len(self.earlier[place])
        round, worker_id = divmod(place, self._num_workers)
        return divided(len(self._drawn_for(round)), (1,) * self._num_workers)[worker_id]

    def fetch(self, place: int) -> Any:
        return self._fetch(self.indices(place))

    def _drawn_for(self, round: int) -> list[Any]:
        if self._round[0] != round:
            first, end = round * self._num_workers, (round + 1) * self._num_workers
            super().has(end - 1)
            self._round = round, [one for batch in self._drawn[first:end] for one in batch]
        return self._round[1]


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
    """Temporarily replaces the `generator` of samplers that have one."""

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
    """A copy, as samplers may reuse their lists; orders are compared as text."""
    return list(drawn) if isinstance(drawn, list | tuple) else drawn
