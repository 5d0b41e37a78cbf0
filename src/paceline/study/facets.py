"""The layout of a study's figures: x axis, panels, and the methods' colours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.observe.drawing import method_colour
from paceline.observe.palette import METHODS
from paceline.observe.words import ABSENT, number_text, span_text
from paceline.study.statistics import SampleEstimate
from paceline.study.trials import METHOD, Measure, Trials, factor_text, level_name, level_text

_MOST_PANELS = 6
_DOT = " \N{MIDDLE DOT} "


class FacetCell(NamedTuple):
    """A method at one level of each axis."""

    method: str
    across: Any
    down: Any
    rows: np.ndarray  # row numbers of its trials
    names: list[str]  # the cells that name it in a table
    row: str  # its name as a row of a method's panel


@dataclass(frozen=True)
class Facets:
    """The layout of a study's figures."""

    trials: Trials
    measure: Measure
    across: str | None  # the factor along the x axis; None if only the method varies
    down: str | None  # the factor with one panel per level; None if there is none with few enough levels
    pooled: tuple[str, ...]  # other factors, whose levels are shown together

    @property
    def across_levels(self) -> list[Any]:
        return self.trials.factors[self.across] if self.across else [None]

    @property
    def down_levels(self) -> list[Any]:
        return self.trials.factors[self.down] if self.down else [None]

    @property
    def across_title(self) -> str:
        return factor_text(self.across) if self.across else ""

    @property
    def pooled_note(self) -> str:
        """A sentence to append, on the factors whose levels are pooled; or ""."""
        names = [factor_text(factor) for factor in self.pooled]
        return f" All levels of {' and '.join(names)} together." if names else ""

    def colour(self, method: str) -> str:
        """The method's colour, the same in all figures."""
        return method_colour(self.trials.methods.index(method))

    def dash(self, method: str) -> str:
        """The line style of a method's curve, which distinguishes methods of the same colour."""
        return ("solid", "dash", "dot")[self.trials.methods.index(method) // len(METHODS["light"]) % 3]

    def rows(self, method: str | None, across: Any = None, down: Any = None) -> np.ndarray:
        """Row numbers of the trials at these levels; None matches any level."""
        where = {METHOD: method, self.across: across, self.down: down}
        return np.flatnonzero(self.trials.rows({k: v for k, v in where.items() if k is not None and v is not None}))

    def cells(self) -> Iterator[FacetCell]:
        """Every method at every level, with its trials; empty ones are left out."""
        for method, down, across in itertools.product(self.trials.methods, self.down_levels, self.across_levels):
            rows = self.rows(method, across, down)
            names = [level_name(level) for level, factor in ((across, self.across), (down, self.down)) if factor]
            if len(rows):
                yield FacetCell(method, across, down, rows, [method, *names], _DOT.join(names[::-1]) or " ")

    @property
    def head(self) -> list[str]:
        """Headings of the columns that name a cell."""
        return ["method", *(factor_text(factor) for factor in (self.across, self.down) if factor)]

    def table(self, heads: Sequence[str], texts: Callable[[FacetCell], Sequence[str]]) -> list[list[str]]:
        return [[*self.head, *heads], *([*cell.names, *texts(cell)] for cell in self.cells())]

    @property
    def rows_note(self) -> str:
        """A sentence to append, on the factors that `FacetCell.row` names; or ""."""
        return f" Rows: {_DOT.join(self.head[:0:-1])}." if len(self.head) > 1 else ""

    def panel_title(self, down: Any) -> str:
        return level_text(self.down, down) if self.down else ""


def facets_of(trials: Trials, down_first: str = "batch_size") -> Facets:
    """Choose axes: workers along x if they vary, else the first numeric factor; panels for `down_first` or the next factor."""
    left = list(trials.others)
    numeric = [name for name in left if all(isinstance(level, int | float) for level in trials.factors[name])]
    across = "workers" if "workers" in left else next(iter([*numeric, *left]), None)
    left = [name for name in left if name != across]
    few = [name for name in left if len(trials.factors[name]) <= _MOST_PANELS]
    down = down_first if down_first in few else next(iter(few), None)
    return Facets(trials, trials.primary, across, down, tuple(name for name in left if name != down))


def estimate_text(one: SampleEstimate) -> str:
    """A median with its interval, `1.23 (1.10 to 1.40)`; a dash if it is unknown."""
    if one.count == 0 or np.isnan(one.value):
        return ABSENT
    if np.isinf(one.value):
        return "not reached"
    if np.isnan(one.low):
        return number_text(one.value)
    return f"{number_text(one.value)} ({span_text(one.low, one.high)})"


def median_of(values: np.ndarray) -> float | None:
    """The median of the known values."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None
