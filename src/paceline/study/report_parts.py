"""Parts of a study's report that are words and tables: the methods at a glance, findings, comparisons, how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.observe.drawing import method_colour
from paceline.observe.markup import (
    cell,
    escape,
    head,
    json_value,
    preformatted,
    row_name,
    settings_table,
    table,
)
from paceline.observe.words import ABSENT, number_text, percent_text
from paceline.study.facets import estimate_text
from paceline.study.findings import FALSE_DISCOVERIES, Comparison, interval_text, times_text
from paceline.study.headline import next_steps
from paceline.study.statistics import arrival_curve, median_estimate, share_estimate
from paceline.study.study_file import dotted
from paceline.study.trials import METHOD, Trials, level_text

__all__ = [
    "comparisons_html",
    "findings_html",
    "glance_html",
    "next_html",
    "provenance_html",
    "read_text",
    "reading_html",
]

_MOST_FINDINGS = 12
_AT_A_GLANCE = (  # name, unit, column, factor
    ("throughput", "samples/s", "samples_per_s", 1),
    ("staleness", "mean", "staleness_mean", 1),
    ("waiting", "% of time", "waiting_share", 100),
    ("accuracy", "test, %", "test_accuracy", 100),
)


def glance_html(trials: Trials) -> str:
    """One row per method: what most readers look for."""
    measure = trials.primary
    timed = measure.kind != "throughput"
    steps = trials.values(trials.measure("steps", measure.percent).column)
    values, times = trials.values(measure.column), trials.times(measure)
    others = [one for one in _AT_A_GLANCE if not np.isnan(trials.values(one[2])).all()]
    heads = [head("method", named=True), head("trials")]
    if timed:
        heads += [head("arrived"), head(measure.title, "s, median (95 % interval)"), head("updates")]
    heads += [*(head(name, unit) for name, unit, *_ in others), head("failed", "95 % interval")]
    rows = []
    for index, method in enumerate(trials.methods):
        mine = trials.method_of == method
        total = int(mine.sum())
        cells = [str(total)]
        if timed:
            reached = times.reached[mine]
            median = median_estimate(values[mine]) if reached.all() else arrival_curve(times[mine]).median
            cells += [f"{int(reached.sum())}", estimate_text(median), _median_text(steps[mine])]
        cells += [_median_text(scale * trials.values(column)[mine]) for *_, column, scale in others]
        failed = int(trials.failed[mine].sum())
        share = share_estimate(failed, total)
        cells.append(f"{failed} ({percent_text(share.low)} to {percent_text(share.high)})" if failed else "0")
        rows.append([row_name(method, method_colour(index)), *map(cell, cells)])
    return (
        f"<h2>The methods at a glance</h2>\n{table(heads, rows, kind='figures-table')}\n<figcaption>Medians over all trials of"
        " a method; the fair comparison is by pairs, below. Failed: diverged or crashed.</figcaption>"
    )


def _median_text(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return number_text(float(np.median(known))) if len(known) else ABSENT


def next_html(trials: Trials, comparisons: Sequence[Comparison]) -> str:
    """What to run next, and why."""
    if not (rows := next_steps(trials, comparisons)):
        return ""
    shown = [[row_name(what), cell(how, kind="name"), cell(why, kind="name")] for what, how, why in rows]
    return f"<h2>What to run next</h2>\n{table([head(one, named=True) for one in ('what', 'how much', 'why')], shown)}"


def findings_html(comparisons: Sequence[Comparison], baseline: str) -> str:
    """The first comparisons that are findings, the most general first."""
    if not comparisons:
        return ""
    found = [one for one in comparisons if one.found]
    tested = sum(one.testable for one in comparisons)
    how = (
        f"{len(found)} of {tested} comparisons are findings: the interval excludes 1, and among all findings at most"
        f" {100 * FALSE_DISCOVERIES:.0f} % are false on average (Benjamini and Hochberg)."
        + (f" The first {_MOST_FINDINGS} are shown." if len(found) > _MOST_FINDINGS else "")
    )
    found.sort(
        key=lambda one: (
            one.factor != METHOD, len(one.where), baseline not in (one.base, one.other), -one.leading.centre,
        )
    )  # fmt: skip
    shown = _comparisons(found[:_MOST_FINDINGS]) if found else ""
    return f"<h2>Findings</h2>\n{shown}<figcaption>{escape(how)}</figcaption>"


def comparisons_html(comparisons: Sequence[Comparison]) -> str:
    """Every comparison, also those that found nothing; folded."""
    if not comparisons:
        return ""
    ordered = sorted(comparisons, key=lambda one: (one.factor != METHOD, len(one.where)))
    return (
        f"<h2>All comparisons</h2>\n<p>Of {escape(comparisons[0].measure.title)}; findings are bold.</p>\n"
        f"<details><summary>All {len(comparisons)} comparisons as a table</summary>{_comparisons(ordered)}</details>"
    )


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    names, figures = ("sooner", "than", "where"), ("ratio", "95 % interval", "pairs", "both arrived", "adjusted p")
    rows = []
    for one in comparisons:
        shown, found = one.leading, "found" if one.found else ""
        where = ", ".join(level_text(factor, level) for factor, level in one.where) or "everywhere"
        known = one.ratio.at_least >= 1 or one.ratio.at_most <= 1
        texts = [
            times_text(shown.ratio) if known else "not known", interval_text(shown.ratio).removeprefix("95 % interval "),
            str(one.ratio.pairs), str(one.ratio.complete), _p_text(one),
        ]  # fmt: skip
        first, second = (level_text(one.factor, level) for level in (shown.other, shown.base))
        named = [cell(text, kind=f"name {found}") for text in (second, where)]
        rows.append([row_name(first, kind=found), *named, *(cell(text, kind=found) for text in texts)])
    return table([*(head(one, named=True) for one in names), *map(head, figures)], rows)


def _p_text(one: Comparison) -> str:
    if not one.testable:
        return ABSENT
    return "<\N{NO-BREAK SPACE}0.001" if one.adjusted_p < 0.001 else f"{one.adjusted_p:.3f}"


def reading_html(trials: Trials) -> str:
    """What the intervals mean."""
    return (
        "<h2>How to read the intervals</h2>\n"
        "<p>Two trials are a pair if they differ in one thing only: the same seed, and all other factors equal. A ratio is "
        "the median over pairs. From 6 pairs on its interval lies between order statistics (the sign test's), so it holds for "
        "any distribution of times; 3 to 5 pairs have Student's interval of the logarithms, which takes these as normal.</p>"
        "<p>A run that never arrived is not dropped: one that was stopped counts as later than its limit, one that diverged "
        "or crashed as never, and a pair in which neither arrived counts against every claim. Pairs are taken as independent, "
        "though those at several settings share their seeds.</p>"
        f"<p>Trials are compared by {escape(trials.primary.title)}"
        f"{', the smallest fraction that half of all trials reached' if trials.primary.kind == 'time' else ''}.</p>"
    )


def provenance_html(trials: Trials, folder: Path, text: str) -> str:
    """The study file as it was run, versions and machine."""
    environment = [(name, [value]) for name, value in _environment(trials, folder).items()]
    file = f"<h2>The study file</h2>\n{preformatted(text.strip())}" if text else ""
    return file + (f"<h2>Versions and machine</h2>\n{settings_table(environment)}" if environment else "")


def _environment(trials: Trials, folder: Path) -> dict[str, str]:
    """Of the file where there is one; of the table's columns otherwise, with every value that occurs."""
    try:
        known = json.loads(read_text(folder / "environment.json") or "{}")
    except ValueError:
        known = {}
    flat = {name: json_value(value) for name, value in dotted(known).items()} if isinstance(known, dict) else {}
    for column in trials.frame.columns:
        if column.startswith("environment.") and (name := column.removeprefix("environment.")) not in flat:
            flat[name] = ", ".join(dict.fromkeys(str(value) for value in trials.frame[column].tolist()))
    return flat


def read_text(path: Path) -> str:
    """A file's text, nothing if there is no such file."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
