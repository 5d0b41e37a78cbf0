"""Batch sizes proportional to worker speed, computed by all workers from the same shared measurements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from paceline.algorithms.base import Algorithm, Slow
from paceline.errors import UsageError
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.round_shares import divided
from paceline.ports.shared import SharedParameters

MEETINGS_BETWEEN = 5  # few enough to react soon; enough for a median that is robust to one disturbed step
_LEAST_GAIN = 0.05  # of a round's time: less is noise, and resizing batches has a cost
_RESOLUTION = 1 << 40  # of the fastest worker's speed

_OWN_BATCHES = (
    "shares=auto divides each round's samples by the workers' speeds, but this loop fetches its own batches: iterate"
    " `for batch in worker.batches(loader)`, or leave out shares."
)


def waiting_less(algorithm: Any, slow: Slow) -> Algorithm | str:
    """As `Algorithm.waiting_less`, of an algorithm with the option `shares`."""
    if slow == "network":
        return "local-sgd"
    with suppress(UsageError):  # equal shares with a codec, for example
        if not algorithm.by_speed:
            return replace(algorithm, shares="auto")
    return "ad-psgd"


@lru_cache(maxsize=16)  # workers that are simulated all ask for the same
def next_sizes(sizes: tuple[int, ...], times_s: tuple[float, ...]) -> tuple[int, ...]:
    """Batch sizes with which all workers need the same time; the current ones if that gains less than 5 %.

    A pure function, so the result is the same on every worker; the sum stays the same.

    Args:
        sizes: the current ones.
        times_s: per sample, by worker; 0: unknown, and the sizes stay.

    >>> next_sizes((64, 64), (0.002, 0.001))
    (43, 85)
    >>> next_sizes((64, 64), (0.00105, 0.001))
    (64, 64)
    """
    if min(times_s) <= 0:
        return sizes
    fastest_s = min(times_s)
    found = divided(sum(sizes), tuple(int(_RESOLUTION * (fastest_s / one)) for one in times_s))
    before_s, after_s = (
        max(size * one for size, one in zip(all_sizes, times_s, strict=True)) for all_sizes in (sizes, found)
    )
    return found if after_s < (1 - _LEAST_GAIN) * before_s else sizes


def limited(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Moves towards the wanted sizes by at most a factor of 2 each way, before normalising to the same sum.

    Steps have costs that do not grow with the batch. If these dominate, the time per sample is high for small batches, so that
    a disturbed measurement that reduced a worker to one sample would confirm itself.

    >>> limited((8, 8, 8), (6, 9, 9))
    (6, 9, 9)
    >>> limited((8, 8, 8), (1, 22, 1))
    (4, 16, 4)
    """
    parts = [min(max(new, -(-size // 2)), 2 * size) for size, new in zip(sizes, wanted, strict=True)]
    return divided(sum(sizes), tuple(parts))


class SharesBySpeed:
    """Exchanges every few meetings how long a sample takes each worker.

    All workers get the same numbers, so all compute the same sizes. These apply from the first round in which no worker has
    claimed a batch: workers whose loaders prefetch report how far ahead they are. After a death or a replacement, the next
    exchange starts from equal sizes.

    Costs: every 5 meetings one all-reduce of two numbers per worker.
    """

    def __init__(self, replica: Replica, ports: Ports[SharedParameters]) -> None:
        self._replica = replica
        self._ports = ports
        self._times_s = [0.0] * ports.num_workers  # as they were measured last
        self._members: Sequence[int] = range(ports.num_workers)  # to whom the sizes belong
        self._num_meetings = 0

    def meet(self) -> None:
        """Call when all workers meet, after the same round.

        Raises:
            UsageError: the loop fetches its batches without `worker.batches`.
        """
        shares, collectives = self._replica.shares, self._ports.collectives
        if shares is None:
            raise UsageError(_OWN_BATCHES)
        self._num_meetings += 1
        if self._num_meetings % MEETINGS_BETWEEN:
            return
        assert collectives is not None
        told = torch.zeros(2, self._ports.num_workers, dtype=torch.float64)
        told[0, self._ports.worker_id] = shares.time_per_sample_s()
        told[1, self._ports.worker_id] = shares.next_round
        collectives.start_all_reduce(told.view(-1)).wait()
        times_s, next_rounds = told.tolist()
        deal, sizes = self._replica.deal, shares.sizes
        members = deal.members if deal is not None else self._members
        equal = (shares.batch_size,) * len(members)
        if list(members) != list(self._members) or sum(sizes) != sum(equal):  # a checkpoint's may be of other members
            self._members, sizes = members, equal
        self._times_s = [
            (new or old) if worker in members else 0.0
            for worker, (new, old) in enumerate(zip(times_s, self._times_s, strict=True))
        ]
        first = deal.first_place % len(members) if deal is not None else 0
        sizes = limited(sizes, next_sizes(sizes, tuple(self._times_s[worker] for worker in members)))
        if (sizes, first) != (shares.sizes, shares.first):
            shares.change(sizes, int(max(next_rounds)), first)

    # For newcomers

    def for_newcomers(self) -> dict[str, Any]:
        return {"times_s": self._times_s, "members": [*self._members], "meetings": self._num_meetings}

    def enter(self, given: dict[str, Any]) -> None:
        self._times_s, self._members, self._num_meetings = given["times_s"], given["members"], given["meetings"]
