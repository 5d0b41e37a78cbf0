"""Fingerprints of an epoch's data, which workers compare: its length, its order, and digests of a few samples."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.ending_processes import ending_with_worker
from paceline.errors import UsageError
from paceline.system.global_randomness import SeparateRandomness, seed_all

UNKNOWN = 0  # not compared
MASK = (1 << 32) - 1
_LONGEST_LIST = 512  # batches; the digest of two small tensors takes 20 us, which delays an epoch by 10 ms
_NUM_ELEMENTS = 1024  # elements digested of a longer tensor or sequence, evenly spaced; at most twice as many
_REMEDY = (
    "workers share each epoch, so build the loader in the same way on every worker and let the loader shuffle; if each"
    " worker has its own data, for example by its rank, write worker.batches(loader, own=True)."
)


def compared_length(length: int | None) -> int:
    """An epoch's length as a number of its fingerprint."""
    return UNKNOWN if length is None else min(length + 1, MASK)


class Fingerprint(NamedTuple):
    """A fingerprint of an epoch's data: numbers of 32 bits."""

    name: str  # the loader's class, or its sampler's
    numbers: Sequence[int]  # the length, a digest of the order, and digests of samples
    is_repeatable: Callable[[], bool] = lambda: True  # whether reading the data again gives the same digests
    is_list: bool = False  # whether the second number digests all batches of a list instead of their order


def check_same(own: Fingerprint, first: Sequence[int]) -> None:
    """Compares this worker's fingerprint with the numbers of the first worker that began the epoch.

    Warns if workers may have divided the data on purpose, or if the data differ with each iteration.

    Raises:
        UsageError: the data differ; the message names the difference.
    """
    name, numbers = own.name, own.numbers
    differ = [UNKNOWN != mine != theirs != UNKNOWN for mine, theirs in zip(numbers, first, strict=False)]
    if not any(differ):
        return
    if differ[0]:
        raise UsageError(
            f"This worker's {name} has {numbers[0] - 1:,} batches, and another worker's has {first[0] - 1:,}: {_REMEDY}"
        )
    others = f"This worker's {name} has different samples than another worker's"
    if differ[1] and own.is_list:
        warnings.warn(
            f"{others}, and each worker uses its share of them. If you did not intend that, {_REMEDY}", stacklevel=2
        )
        return
    if differ[1]:
        raise UsageError(
            f"{name} shuffles differently on each worker, so workers cannot share its batches: let it draw from "
            "torch's, NumPy's or Python's global generator, or from a generator with the same seed on all workers."
        )
    if own.is_repeatable():
        raise UsageError(f"{others}: {_REMEDY}")
    warnings.warn(
        f"{name} yields different samples each time it is iterated, even from the same global random state. If it "
        "shuffles, workers use some samples twice and others never: let it draw from Python's, NumPy's or torch's "
        "global generator, or from a seeded one.",
        stacklevel=2,
    )


def digest_of_all(batches: Sequence[Any]) -> int:
    """A digest of a list's batches that does not depend on their order; UNKNOWN for lists of more than 512."""
    return (sum(map(digest, batches)) & MASK) or 1 if len(batches) <= _LONGEST_LIST else UNKNOWN


def at_four_places(one: Sequence[Any]) -> list[Any]:
    """The first element, the last, and two between them."""
    return [one[(len(one) - 1) * place // 3] for place in range(4)] if len(one) else []


def sample_digests(loader: DataLoader[Any], indices: Sequence[Any], seed: int, *, in_processes: bool) -> list[int]:
    """Digests of samples, each fetched twice with the same random states; UNKNOWN if the two differ.

    The `indices` are as the loader's sampler draws them. With `in_processes`, two loader processes fetch the samples, so that
    the dataset opens no files in this process, which later processes would inherit; samples that depend on the process number
    are not compared.
    """
    dataset: Any = loader.dataset
    many = loader.batch_sampler is not None and hasattr(dataset, "__getitems__")
    if in_processes:
        twin = ending_with_worker(loader)
        twin.num_workers, twin.generator, twin.collate_fn = 2, torch.Generator().manual_seed(seed), digest
        twin.__dict__ |= {"pin_memory": False, "persistent_workers": False, "sampler": None}
        twin.__dict__["batch_sampler"] = [_Seeded([one], seed) for one in indices for _ in range(2)]
        fetched = iter(twin)
        return [one if one == again else UNKNOWN for one, again in zip(fetched, fetched, strict=True)]
    return digests(lambda index: dataset.__getitems__([index]) if many else dataset[index], indices, seed)


def digests(fetch: Callable[[Any], Any], indices: Sequence[Any], seed: int) -> list[int]:
    """As `sample_digests`, of the samples that `fetch` returns in this process."""

    def fetched(index: Any) -> int:
        seed_all(seed)
        return digest(fetch(index))

    with SeparateRandomness(seed):
        twice = [(fetched(one), fetched(one)) for one in indices]
    return [one if one == again else UNKNOWN for one, again in twice]


class _Seeded(list[Any]):
    """Indices of samples; iterating over them seeds the random generators of the loader process."""

    def __init__(self, indices: Sequence[Any], seed: int) -> None:
        super().__init__(indices)
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        seed_all(self._seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Seeded, (self[:], self._seed)


def name_of(sampler: Any) -> str:
    """A sampler's name in messages, or a batch sampler's."""
    name = type(sampler).__name__
    return f"{name} of {name_of(sampler.sampler)}" if type(sampler) is BatchSampler else name


def digest(value: Any, begun: int = 0) -> int:
    """A 32-bit digest of a sample or a batch, never UNKNOWN; objects with unreadable values count by their class."""
    return zlib.crc32(b"".join(_parts(value)), begun) or 1


def _parts(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = value.unbind()
    if isinstance(value, torch.Tensor):
        yield repr((tuple(value.shape), value.dtype)).encode()
        if value.layout == torch.strided and not value.is_quantized and not value.is_meta:
            some = _some(value.detach().resolve_conj().reshape(-1))
            yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield repr((value.shape, value.dtype)).encode()
        some = _some(value.reshape(-1))
        if value.dtype.hasobject:
            yield from _parts(some.tolist())
        else:
            yield some.tobytes()
    elif isinstance(value, Mapping):
        yield from _parts(list(value.items()))
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for one in _some(value):
            yield from _parts(one)
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):  # an image
        yield value.tobytes()[::_NUM_ELEMENTS]


def _some(elements: Any) -> Any:
    return elements[:: max(1, len(elements) // _NUM_ELEMENTS)]
