"""Tables of advice: the ranking for pages and terminals, and the errors of the models."""

from __future__ import annotations

import math
import statistics

from rich import table

from paceline.advice.answer import Advice, Candidate, Prediction
from paceline.advice.words import INTERVAL, measure_name, measure_text, remark
from paceline.observe.document import Cell, Table
from paceline.observe.drawing import method_colour
from paceline.observe.terminal import terminal_table
from paceline.observe.words import (
    ABSENT,
    SECONDS_IN,
    column_unit,
    number_text,
    percent_text,
    seconds_text,
    span_text,
    workers_text,
)
from paceline.planner.estimate import Estimate

EMPHASISED = 6  # candidates with a colour
_SHOWN = 14


def ranking_unit(advice: Advice) -> str:
    """The unit of all times in the ranking."""
    return column_unit([one.time_s.value for one in advice.ranked if one.time_s is not None])


def seconds_in(unit: str, value_s: float) -> str:
    """A time as a number of that unit."""
    return "never" if math.isinf(value_s) else _number(value_s / SECONDS_IN[unit])


def span_in(unit: str, one: Estimate) -> str:
    """An interval in that unit, `10.1 to 15.0`."""
    return span_text(one.low / SECONDS_IN[unit], one.high / SECONDS_IN[unit])


def colour_of(advice: Advice, candidate: Candidate) -> str | None:
    """The colour of one of the best candidates; None for the others."""
    best = [one.candidate for one in advice.ranked[:EMPHASISED] if one.arrives]
    return method_colour(best.index(candidate)) if candidate in best else None


def ranking(advice: Advice) -> Table:
    """A row for each candidate, the best first, as a page shows it."""
    target, unit = advice.target, ranking_unit(advice)
    heads = [
        Cell("candidate", kind="name"), Cell("time to target", f"{unit}, {INTERVAL}"), Cell("times the\nsoonest"),
        Cell("samples\nto target"), Cell("throughput", f"samples/s, {INTERVAL}"), Cell("simulated", f"{unit}, median"),
        Cell("by the models", f"{unit}, {INTERVAL}"), Cell("staleness", "updates, mean"), Cell("remark", kind="name"),
    ]  # fmt: skip
    if target.deadline_s is not None:
        heads.insert(1, Cell(measure_name(target), f"at {seconds_text(target.deadline_s)}, {INTERVAL}"))
    return Table([_row(advice, one) for one in advice.ranked], heads, kind="figures-table")


def _row(advice: Advice, one: Prediction) -> list[Cell]:
    unit, speed, needed = ranking_unit(advice), one.samples_per_s, one.samples_to_target
    kind = "best" if one is advice.best else ""

    def time(found: Estimate | None, otherwise: str = ABSENT) -> Cell:
        return Cell(otherwise) if found is None else Cell(seconds_in(unit, found.value), span_in(unit, found), kind)

    unreached = "not reached" if one.simulated_s or one.modelled_s is not None else "not measured"
    soonest_s = min((other.time_s.value for other in advice.ranked if other.time_s), default=math.nan)
    row = [
        Cell(one.candidate.algorithm, workers_text(one.candidate.workers), colour=colour_of(advice, one.candidate)),
        time(one.time_s, unreached),
        Cell(f"{one.time_s.value / soonest_s:.2f}" if one.time_s and soonest_s else ABSENT, kind=kind),
        Cell(_number(needed.value) if needed else ABSENT, kind=kind),
        Cell(_number(speed.value), f"{_number(speed.low)} to {_number(speed.high)}", kind),
        # "never" where half or more of the simulations do not arrive
        Cell(seconds_in(unit, statistics.median_high(one.simulated_s)) if one.simulated_s else ABSENT, kind=kind),
        time(one.modelled_s),
        Cell(ABSENT if one.staleness is None else f"{one.staleness:.1f}", kind=kind),
        Cell(remark(one), kind="remark"),
    ]
    if advice.target.deadline_s is not None:
        row.insert(1, _measure(advice, one.at_deadline, kind))
    return row


def _measure(advice: Advice, found: Estimate | None, kind: str) -> Cell:
    if found is None:
        return Cell(ABSENT)
    value, low, high = (measure_text(advice.target, one) for one in (found.value, found.low, found.high))
    return Cell(value, f"{low.removesuffix(' %')} to {high.removesuffix(' %')}", kind)


def _number(value: float) -> str:
    """A number for a cell, never wider than eight characters: `640,000`, `12.3 M`; a dash if it is not known."""
    if not math.isfinite(value):
        return ABSENT
    return f"{number_text(value / 1e6)} M" if value >= 9.995e6 else number_text(value)


def ranking_table(advice: Advice) -> table.Table:
    """The ranking for a terminal: intervals below their values, modelled times below simulated ones."""
    target, ranked = advice.target, ranking(advice).rows
    heads = ["work-\ners", f"to target ({ranking_unit(advice)})\n{INTERVAL}", "times\nbest", "samples\nneeded"]
    if target.deadline_s is not None:
        short = "accuracy" if target.accuracy is not None else "loss"
        heads = [heads[0], f"{short} at\n{seconds_text(target.deadline_s)}\n{INTERVAL}", heads[1]]
    heads += ["samples\n/s", "simulated\nmodelled", "stale-\nness"]
    rows = []
    for one, (candidate, *cells, speed, simulated, modelled, stale, _) in zip(
        advice.ranked, ranked[:_SHOWN], strict=False
    ):
        name, bracket, arguments = candidate.text.partition("(")
        texts = [f"{name}\n{bracket}{arguments}", str(one.candidate.workers)]
        texts += [f"{cell.text}\n{cell.below}" for cell in cells[: len(heads) - 4]]
        texts += [speed.text, f"{simulated.text}\n{modelled.text}", stale.text]
        rows.append([Cell(text.rstrip(), kind="best" if one is advice.best else "") for text in texts])
    more = len(ranked) - _SHOWN
    notes = [f"and {more} more, in advice.json and in the report"] if more > 0 else []
    return terminal_table(Table(rows, [Cell("candidate", kind="name"), *heads]), notes=notes)


def fits_table(advice: Advice) -> Table:
    """Errors of each algorithm's models on data left out of the fit."""
    what = "loss" if advice.target.accuracy is None else "error rate"
    counts = sorted({m for one in advice.fits for m in one.leave_one_out})
    heads = [Cell("algorithm", kind="name"), *(Cell(workers_text(m), f"{what}, factor") for m in counts)]
    rows = []
    for one in advice.fits:
        missed = [10 ** one.leave_one_out[m] if m in one.leave_one_out else None for m in counts]
        rows.append([one.algorithm, *map(number_text, missed), percent_text(one.step_error)])
    return Table(rows, [*heads, Cell("step time", "at most")])
