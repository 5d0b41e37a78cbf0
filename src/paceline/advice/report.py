"""Advice as one HTML file that works offline: the verdict, the ranking, the figures, what to mind, and how to start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.advice.answer import Advice
from paceline.advice.figures import advice_figures, colour_of
from paceline.advice.tables import RankedRow, fit_lines, ranked_rows, ranking_unit
from paceline.advice.words import INTERVAL, asked, measure_name, not_tried, verdict
from paceline.observe.document import figure_html, write_page
from paceline.observe.markup import cell, head, listed, paragraphs, preformatted, row_name, settings_table, table
from paceline.observe.words import ABSENT, seconds_text, workers_text

__all__ = ["write_report"]

_FITS = (
    "<h2>How well the models predict what they have not seen</h2>\n<p>Each number of workers was left out in turn, and"
    " predicted from the others. By so much the models missed; of loss or error rate, the part above its optimum.</p>\n"
)


def write_report(advice: Advice, path: Path, *, command: str = "") -> Path:
    """Write the page, about 5 MB, nearly all of it plotly.js."""
    drawn = advice_figures(advice)
    machine = [(f"machine {name}", [value]) for name, value in advice.machine.items()]
    body = [
        *map(figure_html, drawn[:1]),
        _ranking(advice),
        *map(figure_html, drawn[1:]),
        _list("<h2>Mind</h2>\n", advice.warnings),
        _list("<h2>Not tried</h2>\n", not_tried(advice)),
        _list(_FITS, fit_lines(advice)),
        f"<h2>How to ask again</h2>\n{preformatted(command)}",
        settings_table([("it took", [seconds_text(advice.took_s)]), *machine]),
    ]
    return write_page(
        path, title=f"{advice.program}: which algorithm, how many workers", answer=_answer(advice),
        body="\n".join(filter(None, body)), figures=drawn, kind="advice",
    )  # fmt: skip


def _answer(advice: Advice) -> str:
    parts = [paragraphs("asked", [f"Asked: {asked(advice)}"]), paragraphs("answer", [verdict(advice)])]
    if advice.best is not None:
        parts.append(paragraphs("why", advice.reasons))
    return "\n".join([*parts, preformatted(advice.command)])


def _ranking(advice: Advice) -> str:
    target, unit = advice.target, ranking_unit(advice)
    heads = [head("candidate", named=True), head("time to target", f"{unit}, {INTERVAL}")]
    if target.deadline_s is not None:
        heads.insert(1, head(measure_name(target), f"at {seconds_text(target.deadline_s)}, {INTERVAL}"))
    else:
        heads.append(head("times the\nsoonest"))
    heads += [
        head("throughput", f"samples/s, {INTERVAL}"), head("samples\nto target"), head("simulated", f"{unit}, median"),
        head("by the models", f"{unit}, {INTERVAL}"), head("staleness", "updates, mean"), head("remark", named=True),
    ]  # fmt: skip
    shown = table(heads, [_row(advice, row) for row in ranked_rows(advice)], kind="figures-table")
    return (
        f"<h2>Candidates, the best first</h2>\n{shown}\n<figcaption>A dash: not known or never. Samples and throughput are"
        " those of all workers together.</figcaption>"
    )


def _row(advice: Advice, row: RankedRow) -> list[str]:
    one, best = row.one, "best" if row.one is advice.best else ""
    cells = [row.time, row.times_best] if advice.target.deadline_s is None else [row.at_deadline, row.time]
    cells += [row.samples_per_s, row.samples, row.simulated, row.modelled]
    colour = colour_of(advice, one.candidate)
    return [
        row_name(one.candidate.algorithm, colour, workers_text(one.candidate.workers)),
        *(cell(*each, kind=best) for each in cells),
        cell(ABSENT if one.staleness is None else f"{one.staleness:.2f}", kind=best),
        cell("; ".join(filter(None, (one.why_not if one.time_s is None else "", one.extrapolation))), kind="remark"),
    ]


def _list(heading: str, sentences: Sequence[str]) -> str:
    return heading + listed(sentences) if sentences else ""
