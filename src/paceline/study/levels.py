"""A factor's levels: a list, a range in steps, or a range to draw from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from paceline.errors import UsageError, located, shown
from paceline.specs.bounds import LEVELS, RANGE

__all__ = ["Level", "Range", "read_levels"]

Level = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers to draw from, both ends included; whole ones if both ends are.

    Args:
        low: the least.
        high: the largest.
        log: whether their logarithms are drawn uniformly, so that 0.001 to 0.01 counts as much as 0.01 to 0.1.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        for what, end in (("A range's beginning", self.low), ("A range's end", self.high)):
            RANGE.check(what, end)
        if not self.low < self.high:
            raise UsageError(f"a range goes from a smaller number to a larger one, not from {self.low} to {self.high}.")
        if self.log and self.low <= 0:
            raise UsageError(f"a range with log = true must begin above 0, not at {self.low}.")

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, random: Random) -> Level:
        if self.whole and not self.log:
            return random.randint(int(self.low), int(self.high))
        if not self.log:
            return random.uniform(self.low, self.high)
        # of a whole number n, everything that rounds to it
        widen = 0.5 if self.whole else 0.0
        value = math.exp(random.uniform(math.log(self.low - widen), math.log(self.high + widen)))
        return min(max(round(value), int(self.low)), int(self.high)) if self.whole else value

    def as_table(self) -> dict[str, Any]:
        return {"from": self.low, "to": self.high, **({"log": True} if self.log else {})}


def read_levels(name: str, value: Any) -> tuple[Level, ...] | Range:
    """A factor's levels as a study file has them: a list, one level, or `{from, to}` with `step`, `factor` or `log`.

    >>> read_levels("batch_size", {"from": 16, "to": 256, "factor": 4})
    (16, 64, 256)
    >>> read_levels("learning_rate", {"from": 0.001, "to": 0.1, "log": True})
    Range(low=0.001, high=0.1, log=True)

    Raises:
        UsageError: it is none of these.
    """
    where = f"[factors] '{name}'"
    if isinstance(value, Mapping):
        with located(where):
            return _range(value)
    levels = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(level, Level) for level in levels):
        raise UsageError(
            f"{where} must be a list such as [1, 2, 4], or a range such as {{ from = 1, to = 8, factor = 2 }}."
        )
    return levels


def _range(table: Mapping[str, Any]) -> tuple[Level, ...] | Range:
    for key in table:
        if key not in ("from", "to", "step", "factor", "log"):
            raise UsageError(f"a range has from, to, and one of step, factor and log, but no '{key}'.")
    if "to" not in table:
        raise UsageError("a range needs its end: add to = 8.")
    ends = Range(low=table["from"], high=table["to"], log=bool(table.get("log", False)))
    steps = [key for key in ("step", "factor") if key in table]
    if len(steps) + ends.log > 1:
        raise UsageError("a range has one of step, factor and log.")
    if not steps:
        return ends
    by = table[steps[0]]
    least = 0 if steps == ["step"] else 1
    if isinstance(by, bool) or not isinstance(by, int | float) or not by > least:
        raise UsageError(f"{steps[0]} must be a number above {least}, not {shown(by)}.")
    by = min(by, 2 * RANGE.most)  # farther than from one end to the other
    if steps == ["factor"] and ends.low <= 0:
        raise UsageError(f"a range with a factor must begin above 0, not at {ends.low}.")
    levels: list[Level] = []
    while len(levels) < LEVELS.most:
        number = len(levels)
        level = ends.low + number * by if least == 0 else _power(ends.low, by, number)
        if level > ends.high * (1 + 1e-9):
            return tuple(levels)
        levels.append(level if isinstance(level, int) else float(f"{level:.12g}"))
    raise UsageError(f"this range has more than {LEVELS.most:,} levels; take longer steps.")


def _power(first: float, factor: float, number: int) -> float:
    try:
        return first * factor**number
    except OverflowError:
        return math.inf
