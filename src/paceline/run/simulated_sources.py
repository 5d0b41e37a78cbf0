"""Batches for simulated workers: by number from the run's plan, with data or only their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.data.plan import BatchSource
from paceline.data.sources import ABSENT, END, BatchClaims
from paceline.ports.round_shares import RoundShares
from paceline.simulator.replica import RandomStates


@dataclass
class OwnRandomness:
    """A source whose data are loaded under the worker's own random state (data augmentation draws from it)."""

    source: BatchSource
    random_states: RandomStates
    worker_id: int

    def next(self) -> object | None:
        self.random_states.enter(self.worker_id)
        return self.source.next()


@dataclass
class BatchSizes:
    """`(number, samples)` of a plan's batches, without their data; `(-1, 0)` while the worker is absent."""

    claims: BatchClaims

    def next(self) -> tuple[int, int] | None:
        number = self.claims.next()
        if number == END:
            return None
        return (-1, 0) if number == ABSENT else (number, self.claims.size(number))


@dataclass
class DeclaredBatches:
    """`(number, samples)` of a fixed number of full batches for one worker, without a data set."""

    numbers: Iterator[int]  # the run's batch numbers, shared by all workers
    num_left: int  # of this worker's batches
    batch_size: int
    worker_id: int
    shares: RoundShares | None = None  # sizes of the batches, if rounds are dealt by speed; None: all are equal

    def next(self) -> tuple[int, int] | None:
        if not self.num_left:
            return None
        self.num_left -= 1
        if self.shares is None:
            return (next(self.numbers), self.batch_size)
        round, samples = self.shares.next_round, self.batch_size * self.shares.num_workers
        self.shares.next_round += 1
        return (next(self.numbers), len(self.shares.part(round, samples, self.worker_id)))
