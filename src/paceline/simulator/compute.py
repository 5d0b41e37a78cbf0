"""Models of compute time: how long forward and backward take, drawn for each step of each worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from random import Random
from typing import Annotated

from paceline.errors import UsageError
from paceline.specs.bounds import SECONDS_ABOVE_0, Bound
from paceline.specs.registry import Registry
from paceline.specs.types import check_fields

SHAPE = Bound(least=1, above=True)  # of a Pareto distribution with a mean


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """A distribution of the seconds that one full batch takes."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def mean_s(self) -> float:
        raise TypeError(f"{type(self).__name__} must define mean_s")

    def draws_s(self, random: Random) -> Iterator[float]:
        raise TypeError(f"{type(self).__name__} must define draws_s")


@dataclass(frozen=True, kw_only=True)
class Constant(ComputeTime):
    """Every step takes the same time."""

    time_s: Annotated[float, SECONDS_ABOVE_0] = 0.01

    @property
    def mean_s(self) -> float:
        return self.time_s

    def draws_s(self, random: Random) -> Iterator[float]:
        return repeat(self.time_s)


@dataclass(frozen=True, kw_only=True)
class Normal(ComputeTime):
    """A normal distribution, truncated to positive values: small, symmetric disturbances."""

    average_s: Annotated[float, SECONDS_ABOVE_0] = 0.01
    deviation_s: Annotated[float, SECONDS_ABOVE_0] = 0.001

    @property
    def mean_s(self) -> float:
        """`average_s`; ignores the truncation (a millionth if the average is 5 deviations)."""
        return self.average_s

    def draws_s(self, random: Random) -> Iterator[float]:
        while True:
            drawn_s = random.normalvariate(self.average_s, self.deviation_s)
            if drawn_s > 0:
                yield drawn_s


@dataclass(frozen=True, kw_only=True)
class ExponentialTail(ComputeTime):
    """At least `least_s`, plus an exponentially distributed time: occasional, independent disturbances."""

    least_s: Annotated[float, SECONDS_ABOVE_0] = 0.009
    tail_s: Annotated[float, SECONDS_ABOVE_0] = 0.001

    @property
    def mean_s(self) -> float:
        return self.least_s + self.tail_s

    def draws_s(self, random: Random) -> Iterator[float]:
        while True:
            yield self.least_s + random.expovariate(1.0 / self.tail_s)


@dataclass(frozen=True, kw_only=True)
class Pareto(ComputeTime):
    """At least `least_s`, with a power-law tail: occasionally a step takes many times as long.

    Args:
        least_s: the shortest time.
        shape: above 1; the smaller, the heavier the tail (below 2 the variance is infinite).
    """

    least_s: Annotated[float, SECONDS_ABOVE_0] = 0.006
    shape: Annotated[float, SHAPE] = 2.5

    @property
    def mean_s(self) -> float:
        return self.least_s * self.shape / (self.shape - 1)

    def draws_s(self, random: Random) -> Iterator[float]:
        while True:
            yield self.least_s * random.paretovariate(self.shape)


@dataclass(frozen=True, kw_only=True)
class Recorded(ComputeTime):
    """A recorded trace that repeats; each worker starts at its own position."""

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.times_s:
            raise UsageError("A recorded trace of compute times needs at least one number.")
        for time_s in self.times_s:
            SECONDS_ABOVE_0.check("Each time of a recorded trace", time_s)

    @property
    def mean_s(self) -> float:
        return math.fsum(self.times_s) / len(self.times_s)

    def draws_s(self, random: Random) -> Iterator[float]:
        first = random.randrange(len(self.times_s))
        return chain(self.times_s[first:], cycle(self.times_s))


class Trace(Recorded):
    """One worker's recorded times, from its first step on; then they repeat."""

    def draws_s(self, random: Random) -> Iterator[float]:
        return cycle(self.times_s)


compute_registry = Registry("compute time")
compute_registry.register("constant", Constant)
compute_registry.register("normal", Normal)
compute_registry.register("exponential-tail", ExponentialTail)
compute_registry.register("pareto", Pareto)
