"""How many of a round's samples each worker gets by speed: whole numbers, the same on all workers."""

from __future__ import annotations

import statistics
from collections import deque
from functools import lru_cache

_CHANGES_KEPT = 64  # one every few rounds at most, and batches are claimed at most 128 rounds ahead


@lru_cache(maxsize=16)  # workers that are simulated all ask for the same
def divided(total: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers that add up to `total`, in proportion to the weights, each at least 1; with fewer samples the first get 1.

    The rest after rounding down goes to the largest remainders, and among equal ones to the lowest ids. Integer arithmetic
    makes the result exact on every machine.

    >>> divided(10, (2, 1, 0))
    (6, 3, 1)
    >>> divided(2, (1, 1, 5))
    (1, 1, 0)
    """
    if total < len(weights):
        return tuple(int(place < total) for place in range(len(weights)))
    whole = sum(weights)
    above = [max(0, total * weight - whole) for weight in weights]  # what is due beyond the first sample, times `whole`
    spare, due = total - len(weights), sum(above)
    if not due:  # no weights, or one sample for each
        above, due = [1] * len(weights), len(weights)
    sizes = [1 + spare * one // due for one in above]
    by_remainder = sorted(range(len(weights)), key=lambda place: -(spare * above[place] % due))
    for place in by_remainder[: total - sum(sizes)]:
        sizes[place] += 1
    return tuple(sizes)


def num_parts(samples: int, batch_size: int, num_workers: int) -> int:
    """Batches in an epoch of `samples` samples: one per worker and round, as far as the last round has a sample for each."""
    rounds = -(-samples // (num_workers * batch_size))
    return (rounds - 1) * num_workers + min(num_workers, samples - (rounds - 1) * num_workers * batch_size)


class RoundShares:
    """The sizes of all workers' batches, round after round, and how long this worker takes per sample.

    All begin with equal batches. Every worker keeps a copy, and all make the same changes from the same round on, so they
    divide every round in the same way.

    Attributes:
        sizes: the current sizes of the batches of a whole round.
        next_round: the first round in which this worker has not claimed its batch.
    """

    def __init__(self, worker_id: int, num_workers: int) -> None:
        self.worker_id, self.num_workers = worker_id, num_workers
        self.sizes: tuple[int, ...] = (1,) * num_workers
        self.next_round = 0
        self._changes: deque[tuple[int, tuple[int, ...]]] = deque([(0, self.sizes)], _CHANGES_KEPT)
        self._times_s: list[float] = []  # per sample

    def know_batch_size(self, batch_size: int) -> None:
        """Sets the loop's batch size: the mean size of a whole round's batches."""
        if self._changes[-1][0] == 0:
            self.sizes = (batch_size,) * self.num_workers
            self._changes[-1] = (0, self.sizes)

    def part(self, round: int, samples: int, worker_id: int | None = None) -> range:
        """A worker's samples in a round of `samples` samples; by default this worker's."""
        worker_id = self.worker_id if worker_id is None else worker_id
        sizes = next(
            sizes for first, sizes in reversed(self._changes) if first <= round or first == self._changes[0][0]
        )
        if samples != sum(sizes):
            sizes = divided(samples, sizes)
        first = sum(sizes[:worker_id])
        return range(first, first + sizes[worker_id])

    def change(self, sizes: tuple[int, ...], from_round: int) -> None:
        """Sets the sizes from a round on in which no worker has claimed its batch."""
        self.sizes = sizes
        self._changes.append((from_round, sizes))

    def note(self, samples: int, work_s: float) -> None:
        """Notes this worker's time for a step's samples, without waits."""
        self._times_s.append(work_s / samples)

    def time_per_sample_s(self) -> float:
        """Median of the steps since the last call, robust to a few disturbed ones; 0: there were none.

        Uses the smaller of two middle values, because two of a run's first four steps are often slow.
        """
        time_s = statistics.median_low(self._times_s) if self._times_s else 0.0
        self._times_s.clear()
        return time_s
