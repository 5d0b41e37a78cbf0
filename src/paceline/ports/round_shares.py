"""How many of a round's samples each worker gets by speed: whole numbers, the same on all workers."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

_CHANGES_KEPT = 256  # one every few steps at most, and batches are claimed at most 128 rounds ahead


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
    """The sizes of all batches, round after round, and how long this worker takes per sample.

    All begin with equal batches. Every worker keeps a copy, and all make the same changes from the same round on, so they
    divide every round in the same way. A batch keeps its samples even if its worker dies and another trains on it; then, until
    the next change, sizes no longer follow the workers' speeds.

    Attributes:
        num_workers: batches per round.
        batch_size: mean size of a whole round's batches.
        sizes: the members' current ones.
        first: the places of the first member's batches in an epoch, modulo the number of members, who take turns.
        next_round: the first round of which this worker knows no claimed batch.
    """

    def __init__(self, num_workers: int, batch_size: int = 1) -> None:
        self.num_workers = num_workers
        self.next_round = 0
        self._changes: deque[tuple[int, int, tuple[int, ...]]] = deque(maxlen=_CHANGES_KEPT)
        self._times_s: list[float] = []  # per sample
        self.know_batch_size(batch_size)

    def know_batch_size(self, batch_size: int) -> None:
        """Sets the loop's batch size: the mean size of a whole round's batches."""
        if not self._changes or self._changes[-1][0] == 0:
            self._changes.clear()
            self.batch_size = batch_size
            self.change((batch_size,) * self.num_workers, from_round=0)

    def part(self, round: int, samples: int, place: int) -> range:
        """A batch's samples in its round.

        Args:
            round: its number in the run.
            samples: of the round.
            place: the batch's, in its epoch.
        """
        first, sizes = next(
            (first, sizes)
            for from_round, first, sizes in reversed(self._changes)
            if from_round <= round or from_round == self._changes[0][0]
        )
        own = place % self.num_workers
        if first or len(sizes) < self.num_workers:
            begin = place - own - first
            sizes = tuple(sizes[(begin + number) % len(sizes)] for number in range(self.num_workers))
        if samples != sum(sizes):
            sizes = divided(samples, sizes)
        before = sum(sizes[:own])
        return range(before, before + sizes[own])

    def claim(self, epoch: int, numbers: int, place: int) -> None:
        """Notes that some worker may have claimed each batch before this place of an epoch of `numbers` batches."""
        last = self.round_of(epoch, numbers, place - 1)
        self.next_round = max(self.next_round, last + 1)

    def round_of(self, epoch: int, numbers: int, place: int) -> int:
        """The number of the round in which a place of an epoch of `numbers` batches lies."""
        return epoch * -(-numbers // self.num_workers) + place // self.num_workers

    def change(self, sizes: tuple[int, ...], from_round: int, first: int = 0) -> None:
        """Sets the members' sizes from a round on in which no worker has claimed its batch."""
        self.sizes, self.first = sizes, first
        self._changes.append((from_round, first, sizes))

    def changes(self, round: int = 0) -> list[list[int]]:
        """The changes that apply from a round on, except the initial equal sizes; each is its round, `first` and the sizes."""
        before = [number for number, (at, *_) in enumerate(self._changes) if at <= round]
        return [[at, first, *sizes] for at, first, sizes in list(self._changes)[max(before, default=0) :] if at]

    def take_over(self, changes: Sequence[Sequence[int]]) -> None:
        """Divides rounds like a worker that has had these changes."""
        for at, first, *sizes in changes:
            self.change(tuple(sizes), at, first)

    def note(self, samples: int, work_s: float) -> None:
        """Records this worker's time for a step's samples, without waits."""
        self._times_s.append(work_s / samples)

    def time_per_sample_s(self) -> float:
        """Median of the steps since the last call, robust to a few disturbed ones; 0: there were none.

        Uses the smaller of two middle values, because two of a run's first four steps are often slow.
        """
        time_s = statistics.median_low(self._times_s) if self._times_s else 0.0
        self._times_s.clear()
        return time_s
