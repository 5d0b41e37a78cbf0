"""Whether all workers have the same data: an epoch's length, its order and a few of its samples, as numbers to compare."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.errors import UsageError
from paceline.system.global_randomness import SeparateRandomness, seed_all

__all__ = [
    "MASK",
    "UNKNOWN",
    "Told",
    "at_four_places",
    "check_same",
    "digest",
    "digest_of_all",
    "digests",
    "name_of",
    "sample_digests",
    "told_length",
]

UNKNOWN = 0  # a number that is not compared
MASK = (1 << 32) - 1
_LONGEST_LIST = 512  # batches; a digest of one of two small tensors takes 20 us, so that an epoch begins 10 ms later
_NUM_ELEMENTS = 1024  # of a tensor or a sequence, evenly spaced
_REMEDY = (
    "workers share each epoch, so build the loader in the same way on every worker and let it shuffle by itself; if each"
    " worker has data of its own, as by its rank, say worker.batches(loader, own=True)."
)


def told_length(length: int | None) -> int:
    """The number that is compared."""
    return UNKNOWN if length is None else min(length + 1, MASK)


class Told(NamedTuple):
    """What a worker tells of an epoch's data.

    Args:
        name: of the loader, or of its sampler.
        numbers: length, order and digests.
        is_repeatable: whether the digests are the same if this worker reads once more.
        is_list: whether the second number is of all batches of a list, in whatever order.
    """

    name: str
    numbers: Sequence[int]
    is_repeatable: Callable[[], bool] = lambda: True
    is_list: bool = False


def check_same(told: Told, first: Sequence[int]) -> None:
    """Compares what this worker has told with the numbers of the worker that told them first; warns where it cannot.

    Raises:
        UsageError: they differ; the message says in what.
    """
    name, own = told.name, told.numbers
    differ = [UNKNOWN != mine != theirs != UNKNOWN for mine, theirs in zip(own, first, strict=False)]
    if not any(differ):
        return
    if differ[0]:
        raise UsageError(
            f"This worker's {name} has {own[0] - 1:,} batches, and another worker's has {first[0] - 1:,}: {_REMEDY}"
        )
    others = f"This worker's {name} has other samples than another worker's"
    if differ[1] and told.is_list:
        warnings.warn(f"{others}, of which each uses its share. If that is not meant, {_REMEDY}", stacklevel=2)
        return
    if differ[1]:
        raise UsageError(
            f"{name} draws another order on each worker, so they cannot share its batches: let it draw from torch's, NumPy's"
            " or Python's global generator, or from one with the same seed on all workers."
        )
    if told.is_repeatable():
        raise UsageError(f"{others}: {_REMEDY}")
    warnings.warn(
        f"{name} gives other samples whenever it is iterated, whatever the global generators draw: if that is their order, the"
        " workers use some twice and others never. Let it draw from Python's, NumPy's or torch's generator, or a seeded one.",
        stacklevel=2,
    )


def digest_of_all(batches: Sequence[Any]) -> int:
    """A digest of a list's batches that does not depend on their order; UNKNOWN for lists of more than 512."""
    return (sum(map(digest, batches)) & MASK) or 1 if len(batches) <= _LONGEST_LIST else UNKNOWN


def at_four_places(one: Sequence[Any]) -> list[Any]:
    """Its first element, its last, and two between them."""
    return [one[(len(one) - 1) * place // 3] for place in range(4)] if len(one) else []


def sample_digests(loader: DataLoader[Any], indices: Sequence[Any], seed: int, *, in_processes: bool) -> list[int]:
    """Digests of these samples; UNKNOWN for one that is another when it is fetched a second time under the same states.

    Args:
        loader: the user's.
        indices: of the samples, as its sampler draws them.
        seed: of the generators' states while one is fetched, the same on all workers.
        in_processes: a loader's process fetches, and another one the second time: none may inherit files that this one has
            opened, and what one does by its id is no difference.
    """
    dataset: Any = loader.dataset
    many = loader.batch_sampler is not None and hasattr(dataset, "__getitems__")
    if in_processes:
        from paceline.data.loader_processes import ending_with_worker  # which knows of claims, and these of loaders

        twin = ending_with_worker(loader)
        twin.num_workers, twin.generator, twin.collate_fn = 2, torch.Generator().manual_seed(seed), digest
        twin.__dict__ |= {"pin_memory": False, "persistent_workers": False, "sampler": None}
        twin.__dict__["batch_sampler"] = [_Seeded([one], seed) for one in indices for _ in range(2)]
        fetched = iter(twin)
        return [one if one == again else UNKNOWN for one, again in zip(fetched, fetched, strict=True)]
    return digests(lambda index: dataset.__getitems__([index]) if many else dataset[index], indices, seed)


def digests(fetch: Callable[[Any], Any], indices: Sequence[Any], seed: int) -> list[int]:
    """The same of what `fetch` gives in this process."""

    def fetched(index: Any) -> int:
        seed_all(seed)
        return digest(fetch(index))

    with SeparateRandomness(seed):
        twice = [(fetched(one), fetched(one)) for one in indices]
    return [one if one == again else UNKNOWN for one, again in twice]


class _Seeded(list[Any]):
    """Indices that a loader's process fetches under states that follow from the seed."""

    def __init__(self, indices: Sequence[Any], seed: int) -> None:
        super().__init__(indices)
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        seed_all(self._seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Seeded, (self[:], self._seed)


def name_of(sampler: Any) -> str:
    """What a message calls a sampler, or a batch sampler."""
    name = type(sampler).__name__
    return f"{name} of {name_of(sampler.sampler)}" if type(sampler) is BatchSampler else name


def digest(value: Any, begun: int = 0) -> int:
    """31 bits of a sample or a batch, however nested, and never UNKNOWN; of objects that show no values their class."""
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
