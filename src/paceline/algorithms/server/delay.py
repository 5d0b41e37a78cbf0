"""Injected staleness: gradients wait a number of updates before they are applied, even with a single worker.

This isolates the effect of staleness from the randomness of real timing. A `DelayQueue` can precede anything that applies
gradients; `Delayed` is an apply rule with one.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Annotated, Generic, TypeVar

from paceline.specs.bounds import COUNT_FROM_0, SEED
from paceline.specs.types import check_fields

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Delay:
    """How many updates the n-th gradient waits; deterministic.

    Args:
        ramp_updates: number of updates over which the delay grows linearly from 0 to its full length. Training with 20 or
            more updates of staleness from the first step often fails but succeeds with a ramp over the first epochs.

    Reference of the ramp: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, arXiv:1604.00981.
    """

    ramp_updates: Annotated[int, COUNT_FROM_0] = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def full_updates(self, n: int) -> int:
        """Delay of the n-th gradient, from 0, without the ramp."""
        raise TypeError(f"{type(self).__name__} must define full_updates")

    def updates(self, n: int) -> int:
        """Delay of the n-th gradient, from 0, with the ramp."""
        full = self.full_updates(n)
        return full if n >= self.ramp_updates else full * n // self.ramp_updates


@dataclass(frozen=True, kw_only=True)
class ConstantDelay(Delay):
    """The same delay for every gradient.

    Args:
        updates_late: the delay.
    """

    updates_late: Annotated[int, COUNT_FROM_0]

    def full_updates(self, n: int) -> int:
        return self.updates_late


@dataclass(frozen=True, kw_only=True)
class RandomDelay(Delay):
    """Uniformly random from `lowest` to `highest`, inclusive; gradients may overtake each other.

    Args:
        lowest: least delay.
        highest: greatest delay.
        seed: of the draws; the n-th gradient's delay depends on the seed and n only.
    """

    lowest: Annotated[int, COUNT_FROM_0] = 0
    highest: Annotated[int, COUNT_FROM_0]
    seed: Annotated[int, SEED] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) is above highest ({self.highest}): raise highest")

    def full_updates(self, n: int) -> int:
        return Random(f"{self.seed} {n}").randint(self.lowest, self.highest)


@dataclass(frozen=True, kw_only=True)
class RecordedDelay(Delay):
    """Recorded delays in order, repeating after the last.

    Args:
        delays: as "0_3_1"; from a list with `RecordedDelay.of`.

    >>> [RecordedDelay(delays="0_3_1").updates(n) for n in range(4)]
    [0, 3, 1, 0]
    """

    delays: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[0-9]+(_[0-9]+)*", self.delays):
            raise ValueError(
                f"delays must be whole numbers joined by '_', such as 0_3_1, not '{self.delays[:80]}'; from a list in "
                "Python: RecordedDelay.of([0, 3, 1])"
            )
        for one in self._delays:
            COUNT_FROM_0.check("Each of the delays", one)

    @classmethod
    def of(cls, delays: list[int]) -> RecordedDelay:
        return cls(delays="_".join(map(str, delays)))

    @cached_property
    def _delays(self) -> tuple[int, ...]:
        return tuple(map(int, self.delays.split("_")))

    def full_updates(self, n: int) -> int:
        return self._delays[n % len(self._delays)]


class DelayQueue(Generic[T]):
    """Gradients on hold. A constant delay d turns one worker's staleness 0 into d, after the first d updates."""

    def __init__(self, delay: Delay) -> None:
        self._delay = delay
        self.num_put = 0  # number of gradients put in so far
        self.last_wait = 0  # delay of the last one
        # Gradients not yet due, as (put at which it is due, number, item), in due order.
        self.waiting: list[tuple[int, int, T]] = []

    def put(self, item: T) -> list[T]:
        """Adds an item; returns those that are due, longest due first. With delay 0 that is the item itself."""
        n = self.num_put
        self.num_put += 1
        self.last_wait = self._delay.updates(n)
        insort(self.waiting, (n + self.last_wait, n, item), key=lambda one: one[:2])
        num_due = bisect_right(self.waiting, n, key=lambda one: one[0])
        due, self.waiting = self.waiting[:num_due], self.waiting[num_due:]
        return [one for _, _, one in due]
