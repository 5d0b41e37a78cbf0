"""A study's report, one HTML file: headline, tables, figures, all comparisons, and the study file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.table

from paceline.errors import PacelineError, UsageError
from paceline.observe.document import Cell, Table, settings_table, write_page
from paceline.observe.drawing import Figure, method_colour
from paceline.observe.figures import Series, lanes
from paceline.observe.terminal import terminal_table
from paceline.observe.words import ABSENT, number_text, percent_text
from paceline.records.run_data import RunData
from paceline.study.facets import Facets, estimate_text, facets_of, median_of
from paceline.study.figures import (
    arrival_figure,
    box_figure,
    efficiency_figure,
    outcome_figure,
    speedup_figure,
    staleness_figure,
    waiting_figure,
)
from paceline.study.findings import Comparison, compare_everything, interval_text, times_text
from paceline.study.headline import asked, headline, next_steps
from paceline.study.statistics import share_estimate
from paceline.study.study_file import dotted
from paceline.study.table import load_table, target_name
from paceline.study.trials import METHOD, Trials, level_name, level_text

if TYPE_CHECKING:
    import pandas as pd

_MOST_LANE_WORKERS = 16
_MOST_FINDINGS = 12
_AT_A_GLANCE = (  # name, unit, column, factor
    ("throughput", "samples/s", "samples_per_s", 1),
    ("staleness", "mean", "staleness_mean", 1),
    ("waiting", "% of time", "waiting_share", 100),
    ("accuracy", "test, %", "test_accuracy", 100),
)
_MEASURES = {
    "samples_per_s": "samples/s",
    "staleness_mean": "staleness",
    "waiting_share": "waiting",
    "train_loss": "final loss",
    "test_accuracy": "accuracy",
}


def write_report(folder: Path, *, baseline: str | None = None) -> Path:
    """Write `report.html` into a study's folder, in a second or two and with 5 MB even for a thousand trials.

    Args:
        folder: the study's.
        baseline: the method that others are compared with; default: the study's own, else its first.

    Raises:
        UsageError: the folder contains no study, or no trial has the baseline.
    """
    folder = Path(folder)
    return study_page(load_table(folder), folder, baseline=baseline)


def study_page(frame: pd.DataFrame, folder: Path, *, baseline: str | None = None) -> Path:
    """Write the report of this table into the folder, which may also contain `study.toml` and trials."""
    text = read_text(folder / "study.toml")
    study = read_study_file(folder)
    trials = trials_of(frame, study, baseline=baseline)
    comparisons = compare_everything(trials, trials.primary)
    drawn = [*_figures(facets_of(trials)), _lanes(folder, trials, comparisons)] if len(trials) else []
    num_found = sum(one.found for one in comparisons)

    def place(one: Comparison) -> tuple[Any, ...]:
        """Findings first, the most general of them first."""
        general = one.factor != METHOD, len(one.where), trials.baseline not in (one.base, one.other)
        return not one.found, *general, -one.leading.centre

    ordered = sorted(comparisons, key=place)
    return write_page(
        folder / "report.html",
        "study/report.html",
        title=str(study.get("name") or folder.resolve().name),
        asked=asked(trials, study),
        headline=headline(trials, comparisons),
        figures=[one for one in drawn if one is not None and one.traces],
        glance=glance_table(trials),
        next_steps=Table(next_steps(trials, comparisons), ("what", "how much", "why"), kind="words"),
        num_found=num_found,
        num_tested=sum(one.testable for one in comparisons),
        findings=comparisons_table(ordered[: min(num_found, _MOST_FINDINGS)]),
        comparisons=comparisons_table(ordered),
        measure=trials.primary,
        study_file=text.strip(),
        environment=settings_table((name, [value]) for name, value in environment(trials).items()),
    )


def trials_of(
    frame: pd.DataFrame, study: Mapping[str, Any], *, by: str | None = None, baseline: str | None = None
) -> Trials:
    """The table as an experiment, with the given baseline or the one of the study file."""
    named = study.get("baseline") if by in (None, "algorithm") else None
    own = named.get("algorithm") if isinstance(named, Mapping) else None
    factors = study.get("factors")
    listed_in = dotted(factors) if isinstance(factors, Mapping) else {}
    order = {name: levels for name, levels in listed_in.items() if isinstance(levels, list)}
    if baseline is None and own is not None:
        try:
            return Trials(frame, by=by, baseline=own, order=order)
        except UsageError:  # the study compares something else, or spells it differently
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
    """Lanes of a pair of trials that kept their events, of the most certain comparison and with most workers."""
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


def glance_table(trials: Trials) -> Table:
    """One row per method."""
    measure = trials.primary
    timed = measure.kind != "throughput"
    steps = trials.values(trials.measure("steps", measure.percent).column)
    times = trials.times(measure)
    others = [one for one in _AT_A_GLANCE if not np.isnan(trials.values(one[2])).all()]
    heads = [Cell("method", kind="name"), Cell("trials")]
    if timed:
        heads += [Cell("arrived"), Cell(measure.title, "s, median (95 % interval)"), Cell("updates")]
    heads += [*(Cell(name, unit) for name, unit, *_ in others), Cell("failed", "95 % interval")]
    rows = []
    for index, method in enumerate(trials.methods):
        mine = trials.method_of == method
        total = int(mine.sum())
        cells = [str(total)]
        if timed:
            cells += [
                str(times.reached[mine].sum()),
                estimate_text(trials.median(measure, mine)),
                number_text(median_of(steps[mine])),
            ]
        cells += [number_text(median_of(scale * trials.values(column)[mine])) for *_, column, scale in others]
        failed = int(trials.failed[mine].sum())
        share = share_estimate(failed, total)
        cells.append(f"{failed} ({percent_text(share.low)} to {percent_text(share.high)})" if failed else "0")
        rows.append([Cell(method, colour=method_colour(index)), *cells])
    return Table(rows, heads, kind="figures-table")


def comparisons_table(comparisons: Sequence[Comparison]) -> Table:
    """One comparison a row; findings are bold."""
    names, figures = ("sooner", "than", "where"), ("ratio", "95 % interval", "pairs", "both\narrived", "adjusted\np")
    rows = []
    for one in comparisons:
        shown, found = one.leading, "found" if one.found else ""
        where = ", ".join(level_text(factor, level) for factor, level in one.where) or "everywhere"
        known = one.ratio.at_least >= 1 or one.ratio.at_most <= 1
        p_value = ABSENT if not one.testable else "<0.001" if one.adjusted_p < 0.001 else f"{one.adjusted_p:.3f}"
        texts = [
            times_text(shown.ratio) if known else "not known", interval_text(shown.ratio).removeprefix("95 % interval "),
            str(one.ratio.pairs), str(one.ratio.complete), p_value,
        ]  # fmt: skip
        first, second = (level_text(one.factor, level) for level in (shown.other, shown.base))
        named = [Cell(text, kind=f"name {found}") for text in (second, where)]
        rows.append([Cell(first, kind=found), *named, *(Cell(text, kind=found) for text in texts)])
    return Table(rows, [*(Cell(one, kind="name") for one in names), *figures])


def environment(trials: Trials) -> dict[str, str]:
    """Versions and machines of all trials."""
    columns = trials.frame.filter(regex=r"^environment\.")
    return {
        str(name).removeprefix("environment."): ", ".join(dict.fromkeys(map(str, column)))
        for name, column in columns.items()
    }


def read_text(path: Path) -> str:
    """A file's text; empty if the file does not exist."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def medians_table(table: pd.DataFrame, *, target: float, title: str) -> rich.table.Table:
    """One row per combination; a trial that did not reach the target counts as infinitely late in its median."""
    factors = [str(name) for name in table.columns if str(name).startswith("factor.") and name != "factor.seed"]
    varying = [one for one in factors if len(table[one].drop_duplicates()) > 1] or factors[:1]
    name = target_name(target)
    late = {f"time_to_{name}_s": f"s to {name} %", f"steps_to_{name}": f"steps to {name} %"}
    known = table.columns[table.notna().any()]
    heads = {column: head for column, head in (late | _MEASURES).items() if column in known}
    grouped: Any = table.fillna(dict.fromkeys(late, math.inf)).groupby(varying, dropna=False)
    medians = grouped[list(heads)].median()
    outcomes = grouped["outcome"].agg(lambda own: ", ".join(f"{n} {one}" for one, n in own.value_counts().items()))
    rows = [
        [*map(_level, levels if isinstance(levels, tuple) else (levels,)), outcomes.loc[levels], *map(_text, row)]
        for levels, row in zip(medians.index, medians.to_numpy(), strict=True)
    ]
    names = [one.removeprefix("factor.").removeprefix("algorithm.") for one in varying]
    return terminal_table(
        Table(rows, [*(Cell(one, kind="name") for one in (*names, "outcomes")), *heads.values()]), title
    )


def _level(level: Any) -> str:
    return ABSENT if level is None or level != level else level_name(level)


def _text(median: float) -> str:
    return ABSENT if math.isnan(median) else "not reached" if math.isinf(median) else number_text(float(median))
