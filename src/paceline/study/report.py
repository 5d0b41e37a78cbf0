"""A study's report: one HTML file with the headline, tables, figures, all comparisons, and the study file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, UsageError
from paceline.observe.document import Table, settings_table, write_page
from paceline.observe.drawing import Figure
from paceline.observe.panels import Series, lanes
from paceline.records.run_data import RunData
from paceline.study.facets import Facets, facets_of
from paceline.study.findings import Comparison, compare_everything
from paceline.study.headline import asked, headline, next_steps
from paceline.study.map_figures import outcome_figure, staleness_figure, waiting_figure
from paceline.study.report_tables import comparisons_table, environment, findings, glance_table, read_text
from paceline.study.study_file import dotted
from paceline.study.time_figures import arrival_figure, box_figure, efficiency_figure, speedup_figure
from paceline.study.trials import METHOD, Trials, level_text

if TYPE_CHECKING:
    import pandas as pd

_MOST_LANE_WORKERS = 16


def write_report(folder: Path, *, baseline: str | None = None) -> Path:
    """Write `report.html` into a study's folder.

    Costs a second or two, and 5 MB; also for a thousand trials.

    Args:
        folder: the study's.
        baseline: the method that others are compared with; by default the study's own, else its first.

    Raises:
        UsageError: the folder holds no study, or no trial has the baseline.
    """
    from paceline.study.table import load_table

    folder = Path(folder)
    return study_page(load_table(folder), folder, baseline=baseline)


def study_page(frame: pd.DataFrame, folder: Path, *, baseline: str | None = None) -> Path:
    """Write the report of this table into the folder, which may also hold `study.toml` and trials."""
    text = read_text(folder / "study.toml")
    study = read_study_file(folder)
    trials = trials_of(frame, study, baseline=baseline)
    comparisons = compare_everything(trials, trials.primary)
    drawn = [*_figures(facets_of(trials)), _lanes(folder, trials, comparisons)] if len(trials) else []
    found = [one for one in comparisons if one.found]
    return write_page(
        folder / "report.html",
        "study/report.html",
        title=str(study.get("name") or folder.resolve().name),
        asked=asked(trials, study),
        headline=headline(trials, comparisons),
        figures=[one for one in drawn if one is not None and one.traces],
        glance=glance_table(trials),
        next_steps=Table(next_steps(trials, comparisons), ("what", "how much", "why"), kind="words"),
        num_found=len(found),
        num_tested=sum(one.testable for one in comparisons),
        findings=comparisons_table(findings(found, trials.baseline)),
        comparisons=comparisons_table(sorted(comparisons, key=lambda one: (one.factor != METHOD, len(one.where)))),
        measure=trials.primary,
        study_file=text.strip(),
        environment=settings_table((name, [value]) for name, value in environment(trials).items()),
    )


def trials_of(
    frame: pd.DataFrame, study: Mapping[str, Any], *, by: str | None = None, baseline: str | None = None
) -> Trials:
    """The table as an experiment, with the baseline that is given, or that the study file names."""
    named = study.get("baseline") if by in (None, "algorithm") else None
    own = named.get("algorithm") if isinstance(named, Mapping) else None
    factors = study.get("factors")
    listed_in = dotted(factors) if isinstance(factors, Mapping) else {}
    order = {name: levels for name, levels in listed_in.items() if isinstance(levels, list)}
    if baseline is None and own is not None:
        try:
            return Trials(frame, by=by, baseline=own, order=order)
        except UsageError:  # the study compares something else, or spells it in another way
            pass
    return Trials(frame, by=by, baseline=baseline, order=order)


def _figures(facets: Facets) -> list[Figure | None]:
    measure = facets.measure
    return [
        box_figure(facets, measure),
        box_figure(facets, facets.trials.measure("steps", measure.percent)) if measure.percent else None,
        arrival_figure(facets),
        efficiency_figure(facets),
        speedup_figure(facets),
        staleness_figure(facets),
        outcome_figure(facets.trials),
        waiting_figure(facets),
    ]


def _lanes(folder: Path, trials: Trials, comparisons: Sequence[Comparison]) -> Figure | None:
    """Lanes of the first pair whose trials kept their events: the surest comparison's, with most workers."""
    overall = [one for one in comparisons if one.factor == METHOD and not one.where]
    overall.sort(key=lambda one: (one.base != trials.baseline, one.adjusted_p, -one.leading.centre))
    pairs = [rows for one in overall for rows in zip(*trials.pairs(METHOD, one.base, one.other, {}), strict=True)] or [
        (row,) for row in range(len(trials))
    ]
    workers = trials.values("factor.workers")
    pairs.sort(key=lambda rows: -workers[rows[0]] if workers[rows[0]] <= _MOST_LANE_WORKERS else 0)
    for rows in pairs:
        places = [folder / "trials" / str(trials.frame["trial"].iloc[row]) for row in rows]
        if not all(any(place.glob("events-*.jsonl")) for place in places):
            continue
        try:
            runs = [RunData.load(place) for place in places]
        except PacelineError:
            continue
        figure = lanes([Series(run, str(trials.method_of[row])) for run, row in zip(runs, rows, strict=True)])
        if figure is not None:
            settings = [level_text(name, trials.column_of[name][rows[0]]) for name in (*trials.others, "seed")]
            figure.note += f" The pair: {', '.join(settings)}."
            return figure
    return None


def read_study_file(folder: Path) -> dict[str, Any]:
    """The content of `study.toml`; empty if it is missing or damaged, because the report needs only the table."""
    try:
        return tomllib.loads(read_text(folder / "study.toml"))
    except (ValueError, RecursionError):
        return {}
