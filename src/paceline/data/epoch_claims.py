"""The numbers of batches that the workers of a run have claimed in each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

CLAIM_BATCHES = 4  # claimed together, because a round trip to a store takes as long as a small step


class EpochClaims(Protocol):
    """One count per epoch, so that a worker that leaves an epoch at a `break` ends it only for itself."""

    def claim(self, epoch: int) -> int | None:
        """Claims the next batch of the epoch; returns its place, or None if the epoch ended long ago."""
        ...

    def newest(self) -> int:
        """The newest epoch with a claimed batch, or 0; late workers begin there."""
        ...

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        """The fingerprint of an epoch's data from the first worker that gave one, at least up to the first difference.

        Returns this worker's own `numbers` if the epoch ended long ago: at most seven, of 32 bits; 0 means unknown.
        """
        ...

    def hold(self, worker_id: int, number: int) -> None:
        """Records that a worker has claimed a batch ahead, if another worker could take it over."""

    def unhold(self, worker_id: int, number: int) -> None:
        """Records that the batch was handed out."""

    def release(self, worker_id: int, numbers: Collection[int] | None, *, is_left: bool) -> None:
        """Lets others take these batches of a worker (None: all of them); `is_left`: a resumed run can leave them out."""

    def take_released(self, first: int, end: int) -> int | None:
        """A released batch from `first` to `end`, or None."""
        return None


class LocalEpochClaims(EpochClaims):
    """Claims of simulated workers, in one process and one thread."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._agreed: dict[int, Sequence[int]] = {}

    def claim(self, epoch: int) -> int | None:
        self._counts[epoch] += 1
        return self._counts[epoch] - 1

    def newest(self) -> int:
        return max(self._counts, default=0)

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        return self._agreed.setdefault(epoch, numbers)


class StoredEpochClaims(EpochClaims):
    """Claims in a `torch.distributed` store, several at a time; all workers begin together."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._epoch = 0
        self._places: list[int] = []

    def claim(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch = epoch
            self._places.clear()
        if not self._places:
            end = self._store.add(f"next batch/{epoch}", CLAIM_BATCHES)
            self._places.extend(range(end - CLAIM_BATCHES, end))
        return self._places.pop(0)

    def newest(self) -> int:
        return 0

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        return first_said(self._store.compare_set, epoch, numbers)


def first_said(compare_set: Callable[[str, str, str], bytes], epoch: int, numbers: Sequence[int]) -> Sequence[int]:
    """The numbers that the first worker stored, or this worker's own if the stored ones are malformed."""
    said = compare_set(f"data of epoch/{epoch}", "", " ".join(map(str, numbers))).split()
    return [int(one) for one in said] if all(one.isdigit() for one in said) else numbers
