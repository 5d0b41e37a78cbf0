"""Parts of a study: a factor's levels, limits of trials, and the design."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Literal

from paceline.errors import UsageError, located, shown
from paceline.specs.bounds import COUNT, EPOCHS, LEVELS, RANGE, SECONDS_ABOVE_0, SEED, TRIALS
from paceline.specs.types import check_fields

Level = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers to draw from, both ends included; whole ones if both ends are.

    Args:
        log: whether their logarithms are drawn uniformly, so that 0.001 to 0.01 is as likely as 0.01 to 0.1.
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
        # so that as much rounds to the first and the last whole number as to others
        widen = 0.5 if self.whole else 0.0
        value = math.exp(random.uniform(math.log(self.low - widen), math.log(self.high + widen)))
        return min(max(round(value), int(self.low)), int(self.high)) if self.whole else value

    def as_table(self) -> dict[str, Any]:
        return {"from": self.low, "to": self.high, **({"log": True} if self.log else {})}


def read_levels(name: str, value: Any) -> tuple[Level, ...] | Range:
    """Reads a factor's levels from a study file: a list, one level, or `{from, to}` with `step`, `factor` or `log`.

    >>> read_levels("batch_size", {"from": 16, "to": 256, "factor": 4})
    (16, 64, 256)
    >>> read_levels("learning_rate", {"from": 0.001, "to": 0.1, "log": True})
    Range(low=0.001, high=0.1, log=True)
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
        raise UsageError("a range needs an end: add to = 8.")
    ends = Range(low=table["from"], high=table["to"], log=bool(table.get("log", False)))
    steps = [key for key in ("step", "factor") if key in table]
    if len(steps) + ends.log > 1:
        raise UsageError("a range takes only one of step, factor and log.")
    if not steps:
        return ends
    by = table[steps[0]]
    least = 0 if steps == ["step"] else 1
    if isinstance(by, bool) or not isinstance(by, int | float) or not by > least:
        raise UsageError(f"{steps[0]} must be a number above {least}, not {shown(by)}.")
    by = min(by, 2 * RANGE.most)  # longer than the longest range
    if steps == ["factor"] and ends.low <= 0:
        raise UsageError(f"a range with a factor must begin above 0, not at {ends.low}.")
    levels: list[Level] = []
    level = ends.low
    while level <= ends.high * (1 + 1e-9):
        if len(levels) == LEVELS.most:
            raise UsageError(f"this range has more than {LEVELS.most:,} levels; use larger steps.")
        levels.append(level if isinstance(level, int) else float(f"{level:.12g}"))
        level = ends.low + len(levels) * by if least == 0 else level * by
    return tuple(levels)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a trial that has not reached its target.

    Args:
        epochs: passes over the training data; None with `steps` None: the task's.
        steps: instead: gradients per worker.
        seconds: of training, virtual ones in the simulator; the first limit counts.
    """

    epochs: Annotated[float, EPOCHS] | None = None
    steps: Annotated[int, COUNT] | None = None
    seconds: Annotated[float, SECONDS_ABOVE_0] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give either epochs or steps, not both.")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which combinations of levels become trials.

    Args:
        kind: "grid": all combinations; "one-at-a-time": the baseline, and each level of each factor with the others as in the
            baseline; "random": `trials` random combinations; "optuna": `trials` combinations that Optuna chooses by the
            results of earlier ones.
        trials: number of combinations, each tried with every seed.
        seed: of the combinations and of the order of the trials.
        measure: for optuna: a column of the table, such as time_to_5_s, whose median over the seeds counts.
        goal: whether to minimize or maximize it.
    """

    kind: Literal["grid", "one-at-a-time", "random", "optuna"] = "grid"
    trials: Annotated[int, TRIALS] | None = None
    seed: Annotated[int, SEED] = 0
    measure: str | None = None
    goal: Literal["minimize", "maximize"] = "minimize"

    def __post_init__(self) -> None:
        check_fields(self)
        needs_number = self.kind in ("random", "optuna")
        if needs_number and self.trials is None:
            raise UsageError(f"a {self.kind} design needs a number of combinations: add trials = 20.")
        if not needs_number and self.trials is not None:
            raise UsageError(f"a {self.kind} design determines the number of trials itself; leave out trials.")
        if (self.kind == "optuna") != (self.measure is not None):
            remedy = 'add measure = "time_to_5_s"' if self.kind == "optuna" else "leave out measure"
            raise UsageError(f"only an optuna design uses a measure; {remedy}.")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)
