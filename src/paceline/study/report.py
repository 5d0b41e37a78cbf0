"""A study's report: one HTML file with what was asked, the answer, the figures, every comparison, and how to repeat it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, UsageError
from paceline.observe.document import figure_html, prose, write_page
from paceline.observe.panels import lanes
from paceline.records.run_data import RunData
from paceline.study.answer import Answer, answer, asked
from paceline.study.findings import Comparison, compare_everything
from paceline.study.map_figures import outcome_figure, staleness_figure, waiting_figure
from paceline.study.report_parts import (
    comparisons_html,
    findings_html,
    glance_html,
    provenance_html,
    read_text,
    reading_html,
)
from paceline.study.scaling_figures import efficiency_figure, speedup_figure
from paceline.study.time_figures import arrival_figure, box_figure
from paceline.study.trials import METHOD, Trials, level_text
from paceline.study.view import Drawn, View, table_html, view_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["read_study_file", "study_page", "trials_of", "write_report"]

_MOST_LANE_WORKERS = 16
_STYLE = """
.asked { color: var(--soft); }
.part { font-weight: 650; margin: 22px 0 6px; font-size: 16px; }
.findings { padding-left: 1.2em; max-width: 46rem; }
.findings li { margin-bottom: 5px; }
details { margin: 6px 0 12px; font-size: 15px; }
summary { cursor: pointer; color: var(--link); font: 13px/1.5 Inter, -apple-system, "Segoe UI", "Helvetica Neue", Arial,
  "Liberation Sans", sans-serif; }
details table { margin-top: 8px; }
tr.found td, tr.found th { font-weight: 650; }
@media print { details { display: none; } details[open] { display: block; } }
"""


def write_report(folder: Path, *, baseline: str | None = None) -> Path:
    """Write `report.html` into a study's folder.

    Costs a second or two, and 5 MB; also for a thousand trials.

    Args:
        folder: the study's.
        baseline: the method that others are compared with; by default the study's own, else its first.

    Raises:
        UsageError: the folder is no study's, or no trial has the baseline.
    """
    from paceline.study.table import load_table

    folder = Path(folder)
    return study_page(load_table(folder), folder, baseline=baseline)


def study_page(frame: pd.DataFrame, folder: Path, *, baseline: str | None = None) -> Path:
    """Write the report of this table into the folder, which may also hold `study.toml`, `environment.json` and trials."""
    text = read_text(folder / "study.toml")
    study = read_study_file(folder)
    trials = trials_of(frame, study, baseline=baseline)
    comparisons = compare_everything(trials, trials.primary)
    said = answer(trials, comparisons)
    drawn, body = [], [glance_html(trials)]
    if len(trials):
        view = view_of(trials)
        body.append(findings_html(comparisons, trials.baseline))
        for one in _figures(view):
            drawn.append(one.figure)
            body.append(figure_html(one.figure, table_html("The same as a table", one.head, one.rows)))
        if (chosen := _lanes(folder, trials, comparisons)) is not None:
            drawn.append(chosen)
            body.append(figure_html(chosen))
        body.append(comparisons_html(comparisons))
    body += [reading_html(trials), provenance_html(trials, folder, text)]
    title = str(study.get("name") or folder.resolve().name)
    header = f'<p class="asked">{prose(asked(trials, study))}</p>\n' + _answer(said)
    return write_page(
        folder / "report.html", title=title, answer=header, body="\n".join(body), figures=drawn, style=_STYLE
    )


def trials_of(
    frame: pd.DataFrame, study: Mapping[str, Any], *, by: str | None = None, baseline: str | None = None
) -> Trials:
    """The table as an experiment, with the baseline that is given, or that the study file names."""
    named = study.get("baseline") if by in (None, "algorithm") else None
    own = named.get("algorithm") if isinstance(named, Mapping) else None
    order = _orders(study.get("factors"))
    if baseline is None and own is not None:
        try:
            return Trials(frame, by=by, baseline=own, order=order)
        except UsageError:  # the study compares something else, or spells it in another way
            pass
    return Trials(frame, by=by, baseline=baseline, order=order)


def _orders(factors: Any, prefix: str = "") -> dict[str, list[Any]]:
    """The levels of every factor as the study file lists them; names with dots may be tables there."""
    orders: dict[str, list[Any]] = {}
    for name, levels in factors.items() if isinstance(factors, Mapping) else ():
        if isinstance(levels, list):
            orders[prefix + name] = levels
        else:
            orders |= _orders(levels, f"{prefix}{name}.")
    return orders


def _figures(view: View) -> list[Drawn]:
    measure = view.measure
    percent = measure.percent
    drawn = [
        box_figure(view, measure),
        box_figure(view, view.trials.measure("steps", percent)) if percent else None,
        arrival_figure(view),
        efficiency_figure(view),
        speedup_figure(view),
        staleness_figure(view),
        outcome_figure(view),
        waiting_figure(view),
    ]
    return [one for one in drawn if one is not None and one.figure.traces]


def _answer(said: Answer) -> str:
    first, *others = said.verdict
    parts = [f'<p class="answer">{prose(first)}</p>', *(f'<p class="why">{prose(one)}</p>' for one in others)]
    for name, sentences in (("Where it lost", said.lost), ("Other factors", said.effects), ("Failures", said.outcomes)):
        if sentences:
            parts.append(f'<p class="why"><b>{name}.</b> {prose(" ".join(sentences))}</p>')
    if said.next:
        parts.append('<p class="part">What to run next</p>\n<ul class="findings">')
        parts += [*(f"<li>{prose(one)}</li>" for one in said.next), "</ul>"]
    parts += [f'<p class="caution">{prose(one)}</p>' for one in said.caution]
    return "\n".join(parts)


def _lanes(folder: Path, trials: Trials, comparisons: Sequence[Comparison]) -> Any:
    """Lanes of the first two trials of one pair that kept their events: the surest comparison's, with most workers."""
    ordered = sorted(
        (one for one in comparisons if one.factor == METHOD and not one.where),
        key=lambda one: (one.base != trials.baseline, one.adjusted_p, -one.leading.centre),
    )
    pairs = [
        (row, partner)
        for one in ordered
        for row, partner in zip(*trials.pairs(METHOD, one.base, one.other, {}), strict=True)
    ]
    workers = trials.values("factor.workers")

    def fewer(row: int) -> float:
        return -workers[row] if workers[row] <= _MOST_LANE_WORKERS else 0.0

    pairs.sort(key=lambda pair: fewer(pair[0]))  # stable: the surest comparison first among equal workers
    for rows in pairs or [(row,) for row in range(len(trials))]:
        places = [folder / "trials" / str(trials.frame["trial"].iloc[row]) for row in rows]
        if not all(any(place.glob("events-*.jsonl")) for place in places):
            continue
        try:
            runs = [RunData.load(place) for place in places]
        except PacelineError:
            continue
        labels = [str(trials.method_of[row]) for row in rows]
        settings = [level_text(name, trials.column_of[name][rows[0]]) for name in (*trials.others, "seed")]
        if (figure := lanes(runs, labels)) is not None:
            figure.note += f" The pair: {', '.join(settings)}."
            return figure
    return None


def read_study_file(folder: Path) -> dict[str, Any]:
    """What `study.toml` says, nothing if there is none or it is damaged: a report is written from its table all the same."""
    try:
        return tomllib.loads(read_text(folder / "study.toml"))
    except (ValueError, RecursionError):
        return {}
