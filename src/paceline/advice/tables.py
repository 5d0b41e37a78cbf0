"""The ranking's cells, which terminal and page share, and the terminal's table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice

from rich import table

from paceline.advice.answer import Advice, Prediction, Target
from paceline.advice.words import (
    INTERVAL,
    count_text,
    measure_text,
    no_time,
    relative_text,
    seconds_in,
    span_in,
    times_best,
)
from paceline.observe.document import Cell, Table
from paceline.observe.terminal import shown
from paceline.observe.words import ABSENT, column_unit, number_text, percent_text, seconds_text, workers_text
from paceline.planner.estimate import Estimate

_SHOWN = 14


def ranking_unit(advice: Advice) -> str:
    """The unit of all times in the ranking."""
    return column_unit([one.time_s.value for one in advice.ranked if one.time_s is not None])


def ranked_rows(advice: Advice, digits: int) -> Iterator[tuple[Prediction, dict[str, Cell]]]:
    """Every candidate, the best first, with its cells; below most figures their intervals; staleness to so many digits."""
    unit = ranking_unit(advice)
    for one, times in zip(advice.ranked, times_best(advice), strict=True):
        speed, needed = one.samples_per_s, one.samples_to_target
        yield (
            one,
            {
                "time": Cell(no_time(one)) if one.time_s is None else _time(one.time_s, unit),
                "at deadline": _measure(one.at_deadline, advice.target),
                "times best": Cell(relative_text(times)),
                "samples/s": Cell(count_text(speed.value), f"{count_text(speed.low)} to {count_text(speed.high)}"),
                "samples": Cell(ABSENT if needed is None else count_text(needed.value)),
                # "never" where half or more of the simulations do not arrive
                "simulated": Cell(
                    seconds_in(unit, statistics.median_high(one.simulated_s)) if one.simulated_s else ABSENT
                ),
                "modelled": _time(one.modelled_s, unit),
                "staleness": Cell(ABSENT if one.staleness is None else f"{one.staleness:.{digits}f}"),
            },
        )


def _time(found: Estimate | None, unit: str) -> Cell:
    return Cell(ABSENT) if found is None else Cell(seconds_in(unit, found.value), span_in(unit, found))


def _measure(found: Estimate | None, target: Target) -> Cell:
    if found is None:
        return Cell(ABSENT)
    low, high = (measure_text(target, end).removesuffix(" %") for end in (found.low, found.high))
    return Cell(measure_text(target, found.value), f"{low} to {high}")


def ranking_table(advice: Advice) -> table.Table:
    """For the terminal: below a time its interval, and below a simulated value the modelled one."""
    target, ranked = advice.target, advice.ranked
    starred = any(one.extrapolation for one in ranked[:_SHOWN])
    heads = ["work-\ners", f"to target ({ranking_unit(advice)})\n{INTERVAL}"]
    if target.deadline_s is not None:
        short = "accuracy" if target.accuracy is not None else "loss"
        heads.insert(1, f"{short} at\n{seconds_text(target.deadline_s)}\n{INTERVAL}")
    else:
        heads += ["times\nbest", "samples\nneeded"]
    heads += ["samples\n/s", "simulated\nmodelled", "stale-\nness"]
    asked = ["time", "times best", "samples"] if target.deadline_s is None else ["at deadline", "time"]
    rows = []
    for one, cells in islice(ranked_rows(advice, 1), _SHOWN):
        star = "*" if one.extrapolation else " " if starred else ""
        name, bracket, arguments = one.candidate.algorithm.partition("(")
        texts = [f"{name}\n{bracket}{arguments}".rstrip(), f"{one.candidate.workers}{star}"]
        texts += [f"{cells[column].text}\n{cells[column].below}".rstrip() for column in asked]
        texts += [
            cells["samples/s"].text,
            f"{cells['simulated'].text}\n{cells['modelled'].text}",
            cells["staleness"].text,
        ]
        rows.append([Cell(text, kind="best" if one is advice.best else "") for text in texts])
    more = len(ranked) - _SHOWN
    notes = [f"and {more} more, in advice.json and in the report"] if more > 0 else []
    return shown(Table(rows, [Cell("candidate", kind="name"), *heads]), notes=notes)


def fit_lines(advice: Advice) -> list[str]:
    """Prediction errors of the models on left-out data, one line per algorithm."""
    lines = []
    what = "loss" if advice.target.accuracy is None else "error rate"
    for one in advice.fits:
        missed = [f"{number_text(10**error)} with {workers_text(m)}" for m, error in sorted(one.leave_one_out.items())]
        parts = [f"the {what} by a factor of {', '.join(missed)}"] if missed else []
        if one.step_error is not None:
            parts.append(f"a step's time by {percent_text(one.step_error)} at most")
        if parts:
            lines.append(f"{one.algorithm}: {'; '.join(parts)}")
    return lines
