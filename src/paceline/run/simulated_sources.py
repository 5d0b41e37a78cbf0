"""Batches for simulated workers: by number from the run's plan, with data or only their sizes."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.data.plan import BatchSource
from paceline.data.sources import ABSENT, END, BatchClaims
from paceline.ports.round_shares import RoundShares
from paceline.simulator.replica import RandomStates


class OwnRandomness:
    """A source whose data are loaded under the worker's own random state (data augmentation draws from it)."""

    def __init__(self, source: BatchSource, random_states: RandomStates, worker_id: int) -> None:
        self._source = source
        self._random_states = random_states
        self._worker_id = worker_id

    def next(self) -> object | None:
        self._random_states.enter(self._worker_id)
        return self._source.next()


class BatchSizes:
    """`(number, samples)` of a plan's batches, without their data; `(-1, 0)` while the worker is absent."""

    def __init__(self, claims: BatchClaims) -> None:
        self._claims = claims

    def next(self) -> tuple[int, int] | None:
        number = self._claims.next()
        if number == END:
            return None
        return (-1, 0) if number == ABSENT else (number, self._claims.size(number))


class DeclaredBatches:
    """`(number, samples)` of a fixed number of full batches for one worker, without a data set.

    Args:
        numbers: the run's batch numbers, shared by all workers.
        worker_id: of the worker.
        shares: sizes of the batches, if rounds are dealt by speed; None: all are equal.
    """

    def __init__(
        self,
        numbers: Iterator[int],
        num_batches: int,
        batch_size: int,
        worker_id: int,
        shares: RoundShares | None = None,
    ) -> None:
        self._numbers = numbers
        self._left = num_batches
        self._batch_size = batch_size
        self._worker_id = worker_id
        self._shares = shares

    def next(self) -> tuple[int, int] | None:
        if not self._left:
            return None
        self._left -= 1
        if self._shares is None:
            return (next(self._numbers), self._batch_size)
        round, samples = self._shares.next_round, self._batch_size * self._shares.num_workers
        self._shares.next_round += 1
        return (next(self._numbers), len(self._shares.part(round, samples, self._worker_id)))
