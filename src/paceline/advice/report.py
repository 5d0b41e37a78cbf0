"""Advice as one offline HTML file: verdict, ranking, figures, warnings, and the command to start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.advice.answer import Advice, Prediction
from paceline.advice.figures import advice_figures, colour_of
from paceline.advice.tables import fit_lines, ranked_rows, ranking_unit
from paceline.advice.words import INTERVAL, asked, measure_name, verdict
from paceline.observe.document import Cell, Table, settings_table, write_page
from paceline.observe.words import seconds_text, workers_text


def write_report(advice: Advice, path: Path, *, command: str = "") -> Path:
    """Write the page, about 5 MB, nearly all of it plotly.js."""
    machine = [(f"machine {name}", [value]) for name, value in advice.machine.items()]
    return write_page(
        path,
        "advice/report.html",
        title=f"{advice.program}: which algorithm, how many workers",
        asked=asked(advice),
        headline=verdict(advice),
        reasons=advice.reasons if advice.best is not None else (),
        start=advice.command,
        figures=advice_figures(advice),
        ranking=_ranking(advice),
        warnings=advice.warnings,
        not_tried=advice.not_tried,
        fits=fit_lines(advice),
        command=command,
        settings=settings_table([("it took", [seconds_text(advice.took_s)]), *machine]),
    )


def _ranking(advice: Advice) -> Table:
    target, unit = advice.target, ranking_unit(advice)
    heads = [Cell("candidate", kind="name"), Cell("time to target", f"{unit}, {INTERVAL}")]
    if target.deadline_s is not None:
        heads.insert(1, Cell(measure_name(target), f"at {seconds_text(target.deadline_s)}, {INTERVAL}"))
    else:
        heads.append(Cell("times the\nsoonest"))
    heads += [
        Cell("throughput", f"samples/s, {INTERVAL}"), Cell("samples\nto target"), Cell("simulated", f"{unit}, median"),
        Cell("by the models", f"{unit}, {INTERVAL}"), Cell("staleness", "updates, mean"), Cell("remark", kind="name"),
    ]  # fmt: skip
    return Table([_row(advice, *row) for row in ranked_rows(advice, 2)], heads, kind="figures-table")


def _row(advice: Advice, one: Prediction, cells: dict[str, Cell]) -> list[Cell]:
    first = ["time", "times best"] if advice.target.deadline_s is None else ["at deadline", "time"]
    columns, best = [*first, "samples/s", "samples", "simulated", "modelled", "staleness"], one is advice.best
    remark = "; ".join(filter(None, (one.why_not if one.time_s is None else "", one.extrapolation)))
    return [
        Cell(one.candidate.algorithm, workers_text(one.candidate.workers), colour=colour_of(advice, one.candidate)),
        *(replace(cells[name], kind="best" if best else "") for name in columns),
        Cell(remark, kind="remark"),
    ]
