"""Advice in a terminal, readable from 80 columns on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from paceline.advice.answer import Advice, Prediction, Target
from paceline.advice.words import (
    INTERVAL,
    column_unit,
    count_text,
    measure_text,
    no_time,
    relative_text,
    seconds_in,
    span_in,
    times_best,
)
from paceline.observe.compare import ABSENT, percent_text, seconds_text, workers_text

__all__ = ["fit_lines", "ranking_table", "simulated_text"]

_SHOWN = 14


def ranking_table(advice: Advice, *, shown: int = _SHOWN) -> Table:
    """One candidate a row, the best first; below a time its interval, below what was simulated what is modelled.

    Args:
        advice: the answer.
        shown: rows at most; a line says how many more there are.
    """
    target, ranked = advice.target, advice.ranked
    unit = column_unit([one.time_s.value for one in ranked if one.time_s is not None])
    table = Table(header_style="bold", caption_justify="left", caption_style="dim", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.show_edge = False
    table.add_column("candidate", overflow="fold", min_width=12)
    starred = any(one.extrapolation for one in ranked[:shown])
    if target.deadline_s is not None:
        short = "accuracy" if target.accuracy is not None else "loss"
        by = f"{short} at\n{seconds_text(target.deadline_s)}\n{INTERVAL}"
        heads = ["work-\ners", by, f"to target ({unit})\n{INTERVAL}"]
    else:
        heads = ["work-\ners", f"to target ({unit})\n{INTERVAL}", "times\nbest", "samples\nneeded"]
    heads += ["samples\n/s", "simulated\nmodelled", "stale-\nness"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for place, (one, times) in enumerate(zip(ranked[:shown], times_best(advice)[:shown], strict=True)):
        is_best = place == 0 and advice.best is not None
        needed = one.samples_to_target
        star = "*" if one.extrapolation else " " if starred else ""
        cells: list[Text | str] = [f"{one.candidate.workers}{star}"]
        cells += [_at_deadline(one, target)] if target.deadline_s is not None else []
        cells.append(_time(one, unit))
        if target.deadline_s is None:
            cells += [
                relative_text(times),
                ABSENT if needed is None else count_text(needed.value),
            ]
        table.add_row(
            _name(one.candidate.algorithm),
            *cells,
            count_text(one.samples_per_s.value),
            f"{simulated_text(one.simulated_s, unit)}\n"
            + (ABSENT if one.modelled_s is None else seconds_in(unit, one.modelled_s.value)),
            ABSENT if one.staleness is None else f"{one.staleness:.1f}",
            style="bold green" if is_best else None,
        )
    if len(ranked) > shown:
        table.caption = f"and {len(ranked) - shown} more, in advice.json and in the report"
    return table


def simulated_text(times_s: Sequence[float], unit: str) -> str:
    """The median of the simulations; "never" where half or more of them do not arrive, a dash where there are none."""
    return seconds_in(unit, statistics.median_high(times_s)) if times_s else ABSENT


def fit_lines(advice: Advice) -> list[str]:
    """How far the models were from what they had not seen, an algorithm a line."""
    lines = []
    what = "loss" if advice.target.accuracy is None else "error rate"
    for one in advice.fits:
        missed = [f"{10**error:.2f} with {workers_text(m)}" for m, error in sorted(one.leave_one_out.items())]
        parts = [f"the {what} by a factor of {', '.join(missed)}"] if missed else []
        if one.step_error is not None:
            parts.append(f"a step's time by {percent_text(one.step_error)} at most")
        if parts:
            lines.append(f"{one.algorithm}: {'; '.join(parts)}")
    return lines


def _name(spec: str) -> Text:
    """A spec with its arguments on a line of their own."""
    name, bracket, arguments = spec.partition("(")
    return Text(name).append(f"\n{bracket}{arguments}" if bracket else "", style="not bold")


def _time(one: Prediction, unit: str) -> Text:
    if one.time_s is None:
        return Text(no_time(one))
    text = Text(seconds_in(unit, one.time_s.value))
    return text.append(f"\n{span_in(unit, one.time_s)}", style="dim not bold")


def _at_deadline(one: Prediction, target: Target) -> Text:
    found = one.at_deadline
    if found is None:
        return Text(ABSENT)
    low, high = (measure_text(target, end).removesuffix(" %") for end in (found.low, found.high))
    text = Text(measure_text(target, found.value))
    return text.append(f"\n{low} to {high}", style="dim not bold")
