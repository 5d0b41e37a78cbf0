"""Parts of a study's report that are words and tables: the methods at a glance, findings, comparisons, how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.observe.compare import ABSENT, number_text, percent_text
from paceline.observe.document import breakable, escape, prose, swatch
from paceline.study.findings import Comparison, interval_text, times_text
from paceline.study.statistics import arrivals, median_estimate, share_estimate
from paceline.study.trials import METHOD, Trials, level_text
from paceline.study.view import estimate_text

__all__ = ["comparisons_html", "findings_html", "glance_html", "provenance_html", "read_text", "reading_html"]

_MOST_FINDINGS = 12
_WIDE = '<div class="wide" tabindex="0">'


def findings_html(comparisons: Sequence[Comparison], baseline: str) -> str:
    """Sentences, the most general first."""
    found = [one.leading for one in comparisons if one.found]
    if not found:
        return (
            ""
            if not comparisons
            else "<h2>Findings</h2>\n<p>There are none: no interval excludes 1 and holds among all comparisons.</p>"
        )
    found.sort(
        key=lambda one: (one.factor != METHOD, len(one.where), baseline not in (one.base, one.other), -one.centre)
    )
    listed = "".join(f"<li>{prose(one.sentence)}</li>" for one in found[:_MOST_FINDINGS])
    more = (
        f"<p>{len(found) - _MOST_FINDINGS} more are in the table of all comparisons.</p>"
        if len(found) > _MOST_FINDINGS
        else ""
    )
    return f'<h2>Findings</h2>\n<ul class="findings">{listed}</ul>{more}'


def glance_html(trials: Trials) -> str:
    """One row per method: what most readers look for."""
    measure = trials.primary
    timed = measure.kind != "throughput"
    steps = trials.values(trials.measure("steps", measure.percent).column)
    values, times = trials.values(measure.column), trials.times(measure)
    others = [
        ("throughput", "samples/s", "samples_per_s", 1), ("staleness", "mean", "staleness_mean", 1),
        ("waiting", "% of time", "waiting_share", 100), ("accuracy", "test, %", "test_accuracy", 100),
    ]  # fmt: skip
    others = [one for one in others if not np.isnan(trials.values(one[2])).all()]
    heads = [
        "method",
        "trials",
        *(["arrived", f"{measure.title}<small>s, median (95 % interval)</small>", "updates"] if timed else []),
    ]
    heads += [f"{name}<small>{unit}</small>" for name, unit, *_ in others]
    heads += ["failed<small>95 % interval</small>"]
    rows = []
    for index, method in enumerate(trials.methods):
        mine = trials.method_of == method
        cells = [str(int(mine.sum()))]
        if timed:
            reached = times.reached[mine]
            median = median_estimate(values[mine]) if reached.all() else arrivals(times[mine]).median
            cells += [f"{int(reached.sum())}", estimate_text(median)]
            known = steps[mine][~np.isnan(steps[mine])]
            cells.append(number_text(float(np.median(known))) if len(known) else ABSENT)
        for *_, column, scale in others:
            estimate = median_estimate(trials.values(column)[mine])
            cells.append(number_text(scale * estimate.value) if estimate.count else ABSENT)
        failed = int(trials.failed[mine].sum())
        share = share_estimate(failed, int(mine.sum()))
        cells.append(f"{failed} ({percent_text(share.low)} to {percent_text(share.high)})" if failed else "0")
        name = f'<th class="name" scope="row">{swatch(f"@method-{index % 8}")}{breakable(method)}</th>'
        rows.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    shown = "".join(f"<th{' class=name' if at == 0 else ''}>{head}</th>" for at, head in enumerate(heads))
    note = "Medians over all trials of a method; the fair comparison is by pairs, below. Failed: diverged or crashed."
    return (
        f'<h2>The methods at a glance</h2>\n{_WIDE}<table class="figures-table"><thead><tr>{shown}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>\n<figcaption>{note}</figcaption>"
    )


def comparisons_html(comparisons: Sequence[Comparison]) -> str:
    """Every comparison, also those that found nothing; folded."""
    if not comparisons:
        return ""
    rows = []
    for one in sorted(comparisons, key=lambda one: (one.factor != METHOD, len(one.where))):
        shown = one.leading
        where = ", ".join(level_text(factor, level) for factor, level in one.where) or "everywhere"
        known = one.ratio.at_least >= 1 or one.ratio.at_most <= 1
        rows.append(
            f"<tr{' class=found' if one.found else ''}>"
            f'<th scope="row" class="name">{breakable(level_text(one.factor, shown.other))}</th>'
            f'<td class="name">{breakable(level_text(one.factor, shown.base))}</td><td class="name">{escape(where)}</td>'
            f"<td>{escape(times_text(shown.ratio) if known else 'not known')}</td>"
            f"<td>{escape(interval_text(shown.ratio).removeprefix('95 % interval '))}</td>"
            f"<td>{one.ratio.pairs}</td><td>{one.ratio.complete}</td><td>{_p_text(one)}</td></tr>"
        )
    heads = ["sooner", "than", "where", "ratio", "95 % interval", "pairs", "both arrived", "adjusted p"]
    shown_heads = "".join(f"<th{' class=name' if at < 3 else ''}>{head}</th>" for at, head in enumerate(heads))
    return (
        f"<h2>All comparisons</h2>\n<p>Of {escape(comparisons[0].measure.title)}; findings are bold.</p>\n"
        f"<details><summary>All {len(comparisons)} comparisons as a table</summary>"
        f"{_WIDE}<table><thead><tr>{shown_heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "</details>"
    )


def _p_text(one: Comparison) -> str:
    if not one.testable:
        return ABSENT
    return "&lt;&nbsp;0.001" if one.adjusted_p < 0.001 else f"{one.adjusted_p:.3f}"


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
    parts = []
    if text:
        parts.append(f"<h2>The study file</h2>\n<pre>{escape(text.strip())}</pre>")
    environment = _environment(trials, folder)
    if environment:
        rows = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
            for name, value in environment.items()
        )
        parts.append(
            f'<h2>Versions and machine</h2>\n{_WIDE}<table class="settings"><tbody>{rows}</tbody></table></div>'
        )
    return "\n".join(parts)


def _environment(trials: Trials, folder: Path) -> dict[str, str]:
    """Of the file where there is one; of the table's columns otherwise, with every value that occurs."""
    try:
        known = json.loads(read_text(folder / "environment.json") or "{}")
    except ValueError:
        known = {}
    flat = _flat(known) if isinstance(known, dict) else {}
    for column in trials.frame.columns:
        if column.startswith("environment.") and (name := column.removeprefix("environment.")) not in flat:
            flat[name] = ", ".join(dict.fromkeys(str(value) for value in trials.frame[column].tolist()))
    return flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def read_text(path: Path) -> str:
    """A file's text, nothing if there is no such file."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
