"""How long to wait after losing a race for the parameters, before trying again.

Waiting trades retry traffic against staleness: while a worker waits, others publish. The unit is the measured time of one
update (the thesis's T_u), so that a setting means the same on a small and on a large model.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Annotated

from paceline.specs.bounds import SHARE, UPDATE_TIMES
from paceline.specs.types import check_fields


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Waiting time as a function of the number of failed attempts."""

    def __post_init__(self) -> None:
        check_fields(self)

    def units(self, attempt: int, random: Random) -> float:
        """Time to wait after the `attempt`-th failure (from 1), in update times."""
        raise TypeError(f"{type(self).__name__} must define units")


@dataclass(frozen=True, kw_only=True)
class NoBackoff(Backoff):
    """Try again at once."""

    def units(self, attempt: int, random: Random) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class ConstantBackoff(Backoff):
    """The same time after every failure.

    Args:
        base: the time, in update times.
        jitter: share of it that is drawn uniformly at random (0: exactly `base`, 1: between 0 and `base`).
    """

    base: Annotated[float, UPDATE_TIMES] = 1.0
    jitter: Annotated[float, SHARE] = 0.5

    def units(self, attempt: int, random: Random) -> float:
        return _jittered(self.base, self.jitter, random)


@dataclass(frozen=True, kw_only=True)
class LinearBackoff(Backoff):
    """A time that grows with every failure: base, 2 base, 3 base, ... up to cap (all in update times)."""

    base: Annotated[float, UPDATE_TIMES] = 1.0
    cap: Annotated[float, UPDATE_TIMES] = 64.0
    jitter: Annotated[float, SHARE] = 0.5

    def units(self, attempt: int, random: Random) -> float:
        return _jittered(min(self.base * attempt, self.cap), self.jitter, random)


@dataclass(frozen=True, kw_only=True)
class ExponentialBackoff(Backoff):
    """A time that doubles with every failure: base, 2 base, 4 base, ... up to cap (all in update times)."""

    base: Annotated[float, UPDATE_TIMES] = 1.0
    cap: Annotated[float, UPDATE_TIMES] = 64.0
    jitter: Annotated[float, SHARE] = 0.5

    def units(self, attempt: int, random: Random) -> float:
        exponent = min(attempt - 1, 63)  # 2^63 update times is beyond every cap; larger exponents only overflow
        return _jittered(min(self.base * 2.0**exponent, self.cap), self.jitter, random)


def _jittered(units: float, jitter: float, random: Random) -> float:
    """Draws from [(1 - jitter) * units, units], so that two losers of one race do not collide again."""
    return units * (1.0 - jitter * random.random()) if jitter else units
