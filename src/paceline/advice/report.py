"""Advice as one HTML file that works offline: the verdict, the ranking, the figures, what to mind, and how to start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.advice.answer import Advice, Prediction, Target
from paceline.advice.figures import advice_figures, colour_of
from paceline.advice.tables import fit_lines, simulated_text
from paceline.advice.words import (
    INTERVAL,
    circumstances_text,
    column_unit,
    count_text,
    measure_name,
    measure_text,
    no_time,
    not_tried,
    relative_text,
    seconds_in,
    span_in,
    target_text,
    times_best,
    verdict,
)
from paceline.observe.compare import ABSENT, seconds_text, workers_text
from paceline.observe.document import breakable, escape, figure_html, prose, swatch, write_page
from paceline.planner.estimate import Estimate

__all__ = ["write_report"]

_STYLE = """
.asked { color: var(--soft); }
.said { padding-left: 1.2em; max-width: 46rem; }
.said li { margin-bottom: 6px; overflow-wrap: anywhere; }
td.remark { text-align: left; min-width: 15em; max-width: 26em; }
tbody th.name { min-width: 13em; }
tbody td { white-space: nowrap; }
td.remark, .settings td { white-space: normal; }
@media (max-width: 640px) { tbody th.name { min-width: 9em; } }
"""


def write_report(advice: Advice, path: Path, *, command: str = "") -> Path:
    """Write the page, about 5 MB, nearly all of it plotly.js.

    Args:
        advice: the answer.
        path: the HTML file.
        command: that asked for the advice.
    """
    drawn = advice_figures(advice)
    body = [
        *map(figure_html, drawn[:1]),
        _ranking(advice),
        *map(figure_html, drawn[1:]),
        _list("Mind", advice.warnings),
        _list("Not tried", not_tried(advice)),
        _fits(advice),
        _provenance(advice, command),
    ]
    return write_page(
        path, title=f"{advice.program}: which algorithm, how many workers", answer=_answer(advice),
        body="\n".join(filter(None, body)), figures=drawn, style=_STYLE,
    )  # fmt: skip


def _answer(advice: Advice) -> str:
    said, deadline_s = circumstances_text(advice.circumstances), advice.target.deadline_s
    by = "" if deadline_s is None else f" by {seconds_text(deadline_s)}"
    asked = f"Asked: {target_text(advice.target)}{by}{f', {said}' if said else ''}."
    parts = [f'<p class="asked">{prose(asked)}</p>', f'<p class="answer">{prose(verdict(advice))}</p>']
    if advice.best is not None:
        parts += [f'<p class="why">{prose(one)}</p>' for one in advice.reasons]
    if advice.command:
        parts.append(f"<pre>{escape(advice.command)}</pre>")
    return "\n".join(parts)


def _ranking(advice: Advice) -> str:
    target = advice.target
    unit = column_unit([one.time_s.value for one in advice.ranked if one.time_s is not None])
    heads = [f"<th>time to target<small>{unit}, {INTERVAL}</small></th>"]
    if target.deadline_s is not None:
        by = f"at {seconds_text(target.deadline_s)}, {INTERVAL}"
        heads.insert(0, f"<th>{measure_name(target)}<small>{by}</small></th>")
    else:
        heads.append("<th>times the<br>soonest</th>")
    heads += [
        f"<th>throughput<small>samples/s, {INTERVAL}</small></th>", "<th>samples<br>to target</th>",
        f"<th>simulated<small>{unit}, median</small></th>", f"<th>by the models<small>{unit}, {INTERVAL}</small></th>",
        "<th>staleness<small>updates, mean</small></th>", '<th class="name">remark</th>',
    ]  # fmt: skip
    rows = "".join(_row(advice, one, times, unit) for one, times in zip(advice.ranked, times_best(advice), strict=True))
    return (
        '<h2>Candidates, the best first</h2>\n<div class="wide" tabindex="0"><table class="figures-table"><thead><tr>'
        f'<th class="name">candidate</th>{"".join(heads)}</tr></thead><tbody>{rows}</tbody></table></div>\n'
        "<figcaption>A dash: not known or never. Samples and throughput are those of all workers together.</figcaption>"
    )


def _row(advice: Advice, one: Prediction, times: float | None, unit: str) -> str:
    target = advice.target
    colour = colour_of(advice, one.candidate)
    name = breakable(one.candidate.algorithm)
    cells = [_times(one.time_s, unit) if one.time_s is not None else no_time(one)]
    if target.deadline_s is None:
        cells.append(relative_text(times))
    else:
        cells.insert(0, _at_deadline(one.at_deadline, target))
    needed, speed = one.samples_to_target, one.samples_per_s
    cells += [
        _with(count_text(speed.value), f"{count_text(speed.low)} to {count_text(speed.high)}"),
        ABSENT if needed is None else count_text(needed.value),
        simulated_text(one.simulated_s, unit),
        _times(one.modelled_s, unit),
        ABSENT if one.staleness is None else f"{one.staleness:.2f}",
    ]  # fmt: skip
    remark = "; ".join(filter(None, (one.why_not if one.time_s is None else "", one.extrapolation)))
    workers = f"<small>{workers_text(one.candidate.workers)}</small>"
    first = f'<th class="name" scope="row">{swatch(colour) if colour else ""}{name}{workers}</th>'
    best = ' class="best"' if one is advice.best else ""
    return (
        f'<tr>{first}{"".join(f"<td{best}>{cell}</td>" for cell in cells)}<td class="remark">{escape(remark)}</td></tr>'
    )


def _times(one: Estimate | None, unit: str) -> str:
    return ABSENT if one is None else _with(seconds_in(unit, one.value), span_in(unit, one))


def _at_deadline(one: Estimate | None, target: Target) -> str:
    if one is None:
        return ABSENT
    return _with(
        measure_text(target, one.value), f"{measure_text(target, one.low)} to {measure_text(target, one.high)}"
    )


def _with(value: str, span: str) -> str:
    return f"{value}<small>{span}</small>"


def _list(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f'<h2>{title}</h2>\n<ul class="said">{"".join(f"<li>{prose(one)}</li>" for one in sentences)}</ul>'


def _fits(advice: Advice) -> str:
    """Leave-one-out errors, in words."""
    lines = fit_lines(advice)
    if not lines:
        return ""
    return (
        "<h2>How well the models predict what they have not seen</h2>\n<p>Each number of workers was left out in turn, and"
        " predicted from the others. By so much the models missed; of loss or error rate, the part above its optimum.</p>\n"
        f'<ul class="said">{"".join(f"<li>{prose(line)}</li>" for line in lines)}</ul>'
    )


def _provenance(advice: Advice, command: str) -> str:
    rows = [("it took", seconds_text(advice.took_s))]
    rows += [
        (f"machine {name}", value if isinstance(value, str) else json.dumps(value))
        for name, value in advice.machine.items()
    ]
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    asked = f"<pre>{escape(command)}</pre>\n" if command else ""
    return (
        f'<h2>How to ask again</h2>\n{asked}<div class="wide" tabindex="0"><table class="settings"><tbody>{cells}</tbody>'
        "</table></div>"
    )
