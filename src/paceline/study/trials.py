"""A study's table as an experiment: the factors that vary, pairs of trials, and measures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.errors import UsageError
from paceline.observe.words import workers_text
from paceline.records.run_data import is_number
from paceline.study.statistics import SampleEstimate, Times, arrival_curve, median_estimate

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("converged", "stopped", "diverged", "crashed")
METHOD = "method"  # the factor compared, with the fields that only some of its levels have
NOT_SET = "not set"
_PREFIX = "factor."
_SEED = "seed"
_FRACTION_COLUMN = re.compile(r"time_to_(\d+(?:\.\d+)?)_s")
_MOST_LEVELS = 24  # a factor with more levels, as in random designs, is not compared level by level


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure that compares trials; lower is better, except for throughput."""

    #: Time or updates until a fraction of the initial loss, or samples per second.
    kind: Literal["time", "steps", "throughput"]
    percent: str  # that fraction in percent; empty for throughput
    column: str  # of the table

    @property
    def goal(self) -> str:
        return f"{self.percent} % of the initial loss"

    @property
    def unit(self) -> str:
        return {"time": "s", "steps": "updates", "throughput": "samples/s"}[self.kind]

    @property
    def title(self) -> str:
        return {"time": f"time to {self.goal}", "steps": f"updates to {self.goal}", "throughput": "throughput"}[
            self.kind
        ]


class Trials:
    """The trials of a study and the factors between them.

    Args:
        frame: one row per trial, as `load_table` returns it.
        by: the factor that is compared; default: the algorithm if it varies, else the first factor that does.
        baseline: its level that the others are compared with; default: the first.
        order: factor -> its levels in the order to show them in, as trials run in random order.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        *,
        by: str | None = None,
        baseline: Any = None,
        order: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._order = {name: [str(_plain(level)) for level in levels] for name, levels in (order or {}).items()}
        self.frame = frame.sort_values("number", kind="stable").reset_index(drop=True) if len(frame) else frame
        names = [name.removeprefix(_PREFIX) for name in self.frame.columns if name.startswith(_PREFIX)]
        self.all_factors = [name for name in names if name != _SEED]
        self.column_of = {name: self._column(name) for name in [*self.all_factors, _SEED]}
        self.factors = {name: levels for name in self.all_factors if len(levels := self.levels(name)) > 1}
        listed = [name for name, levels in self.factors.items() if len(levels) <= _MOST_LEVELS]
        self.by = by or ("algorithm" if "algorithm" in listed else next(iter(listed), "algorithm"))
        # Fields that some algorithms lack are part of the method: `leashed, persistence 1` against `hogwild`.
        self.own_fields = [name for name in listed if name != self.by and NOT_SET in self.factors[name]]
        self.others = [name for name in listed if name != self.by and name not in self.own_fields]
        self.column_of.setdefault(self.by, self._column(self.by))
        self.method_of = np.array([self._method(row) for row in range(len(self))], dtype=object)
        places = [self._places(name) for name in (self.by, *self.own_fields)]
        self.methods = list(dict.fromkeys(self.method_of[np.lexsort(places[::-1])].tolist()))
        self.baseline = self._baseline(baseline)
        self._times: dict[Measure, Times] = {}
        self._partners: dict[str, pd.DataFrame] = {}

    def __len__(self) -> int:
        return len(self.frame)

    def levels(self, factor: str) -> list[Any]:
        """A factor's levels: numbers by size, strings in the given order, then in order of occurrence."""
        levels = list(dict.fromkeys(self.column_of[factor].tolist()))
        if all(map(is_number, levels)):
            return sorted(levels)
        places = {level: place for place, level in enumerate(self._order.get(factor, ()))}
        return sorted(levels, key=lambda level: places.get(str(level), len(places)))

    def values(self, column: str) -> np.ndarray:
        """A column's numbers, with NaN for missing ones."""
        import pandas

        values: Any = self.frame.get(column, pandas.Series(np.nan, self.frame.index))
        return np.asarray(pandas.to_numeric(values, errors="coerce"), np.float64)

    def rows(self, where: Mapping[str, Any]) -> np.ndarray:
        """Which trials have these levels, as a mask."""
        mask = np.ones(len(self), dtype=bool)
        for factor, level in where.items():
            mask &= (self.method_of if factor == METHOD else self.column_of[factor]) == level
        return mask

    @cached_property
    def outcomes(self) -> np.ndarray:
        return np.array(self.frame["outcome"].tolist(), dtype=object)

    @cached_property
    def failed(self) -> np.ndarray:
        return np.isin(self.outcomes.astype(str), ("diverged", "crashed"))

    @cached_property
    def fractions(self) -> list[str]:
        """Fractions of the initial loss that the table has times for, in percent, the largest first."""
        found = [match[1] for name in self.frame.columns if (match := _FRACTION_COLUMN.fullmatch(name))]
        return sorted(found, key=float, reverse=True)

    def measure(self, kind: Literal["time", "steps"], percent: str) -> Measure:
        return Measure(kind, percent, f"{kind}_to_{percent}{'_s' if kind == 'time' else ''}")

    @cached_property
    def primary(self) -> Measure:
        """Time to the smallest fraction that half of all trials reached, or else any trial; or else throughput."""
        reached = {
            percent: (~np.isnan(self.values(self.measure("time", percent).column))).mean()
            for percent in self.fractions
            if len(self)
        }
        for least in (0.5, np.nextafter(0, 1)):
            enough = [percent for percent, share in reached.items() if share >= least]
            if enough:
                return self.measure("time", min(enough, key=float))
        return Measure("throughput", "", "samples_per_s")

    def times(self, measure: Measure) -> Times:
        """Every trial's measure as a time; for throughput, the time per sample."""
        if measure not in self._times:
            values = self.values(measure.column)
            if measure.kind == "throughput":
                with np.errstate(divide="ignore"):
                    each = 1 / values
                times = Times(np.where(np.isnan(each), 0, each), np.where(np.isnan(each), np.inf, each))
            else:
                ended = self.values("wall_s" if measure.kind == "time" else "steps")
                times = Times.of(values, ended, self.failed)
            self._times[measure] = times
        return self._times[measure]

    def median(self, measure: Measure, rows: np.ndarray) -> SampleEstimate:
        """The median of these trials; those that did not reach the target count as later than all others."""
        values = self.values(measure.column)[rows]
        if measure.kind == "throughput" or not np.isnan(values).any():
            return median_estimate(values)
        return arrival_curve(self.times(measure)[rows]).median

    def pairs(self, factor: str, base: Any, other: Any, where: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of trials that differ in this factor alone: those at `base`, and each one's partner at `other`.

        `where`: levels of other factors that the pairs have.
        """
        partners = self._partners_of(factor)
        if base not in partners or other not in partners:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first, second = partners[[base, other]].dropna().to_numpy(np.int64).T
        kept = self.rows(where)[first]
        return first[kept], second[kept]

    def _partners_of(self, factor: str) -> pd.DataFrame:
        """A row for each group of trials that differ only in this factor, with the number of each level's trial."""
        import pandas

        if factor not in self._partners:
            left_out = {self.by, *self.own_fields} if factor == METHOD else {factor}
            shared = pandas.DataFrame({name: own for name, own in self.column_of.items() if name not in left_out})
            levels = self.method_of if factor == METHOD else self.column_of[factor]
            groups = shared.groupby(list(shared), sort=False).ngroup()
            trials = pandas.DataFrame({"group": groups, "level": levels, "row": range(len(self))})
            # Repeats of equal trials are paired in order.
            trials["repeat"] = trials.groupby(["group", "level"]).cumcount()
            self._partners[factor] = trials.pivot(index=["group", "repeat"], columns="level", values="row")
        return self._partners[factor]

    def _column(self, factor: str) -> np.ndarray:
        name = _PREFIX + factor
        if name not in self.frame.columns:
            return np.full(len(self), "all trials", dtype=object)
        values = np.empty(len(self), dtype=object)
        values[:] = [_plain(value) for value in self.frame[name].tolist()]
        return values

    def _method(self, row: int) -> str:
        own = [(name, self.column_of[name][row]) for name in self.own_fields]
        parts = [(self.by, self.column_of[self.by][row]), *(one for one in own if one[1] != NOT_SET)]
        return ", ".join(level_text(*part) for part in parts)

    def _places(self, factor: str) -> list[int]:
        """Each trial's level as its index among the levels."""
        order = {level: index for index, level in enumerate(self.levels(factor))}
        return [order[level] for level in self.column_of[factor]]

    def _baseline(self, wanted: Any) -> str:
        """The method with this level, or with this name; default: the first."""
        if wanted is None:
            return self.methods[0] if self.methods else ""
        for method in self.methods:
            level = self.column_of[self.by][np.flatnonzero(self.method_of == method)[0]]
            if str(wanted) in (method, str(level)) or _plain(wanted) == level:
                return method
        raise UsageError(
            f"No trial of this study has the baseline '{wanted}'; choose one of: {', '.join(self.methods)}."
        )


def _plain(value: Any) -> Any:
    """A level that compares equal to itself, unlike NaN."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or value != value or type(value).__name__ == "NAType":
        return NOT_SET
    return int(value) if isinstance(value, float) and value.is_integer() else value


def level_name(level: Any) -> str:
    """A level without its factor."""
    return f"{level:g}" if isinstance(level, float) else str(level)


def level_text(factor: str, level: Any) -> str:
    """A level for headings: `8 workers`, `batch size 64`, or a spec unchanged."""
    if factor == "workers" and isinstance(level, int):
        return workers_text(level)
    text = level_name(level)
    return text if factor in ("algorithm", METHOD) else f"{factor_text(factor)} {text}"


def factor_text(factor: str) -> str:
    """A factor's name in prose: `batch size`, `persistence`.

    >>> factor_text("algorithm.backoff.base")
    'backoff base'
    """
    return factor.removeprefix("algorithm.").replace("_", " ").replace(".", " ")
