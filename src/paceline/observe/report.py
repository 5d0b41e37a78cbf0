"""A self-contained HTML report of one or several runs: a headline, the table, the figures, and how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.observe.compare import evaluated_notes, run_labels
from paceline.observe.document import Table, json_value, settings_table, write_page
from paceline.observe.figures import figures, method_colours
from paceline.observe.headline import caution, headline
from paceline.observe.tables import runs_table
from paceline.observe.words import ABSENT
from paceline.records.run_data import RunData

__all__ = ["runs_and_notes", "write_report"]


def write_report(runs: Sequence[RunData], path: str | Path, *, title: str, command: str) -> Path:
    """Write a self-contained report; several runs are compared.

    Costs about 5 MB on disk, nearly all of it plotly.js, and a second or two for long runs.

    Args:
        runs: the runs, in the order in which the table should list them.
        path: the HTML file.
        title: heading.
        command: the exact command that made the runs.
    """
    runs = [RunData(one.config, {**one.config, **one.result}, one.records, one.evaluations) for one in runs]
    results = [run.result for run in runs]
    return write_page(
        path,
        "observe/run.html",
        title=title,
        headline=headline(results),
        figures=figures(runs),
        **runs_and_notes(results),
        command=command,
        settings=_settings(runs),
    )


def runs_and_notes(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of every run, and how to read them, for the template."""
    table = runs_table(results, method_colours(results))
    notes = [
        "Bold: more than 5 % better than the next, among runs that ended well."
        if any(cell.kind == "best" for row in table.rows for cell in row)
        else "",
        "A dash: not reached or not measured. Training loss: mean of the last 100 batches applied; times until it was reached"
        " count from the start of training.",
        *evaluated_notes(results),
        caution(results),
    ]
    return {"runs": table, "notes": " ".join(filter(None, notes))}


def _settings(runs: Sequence[RunData]) -> Table:
    """The configurations, with facts from the results: where they ran, with which versions."""
    settings = [_settings_of(run) for run in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [(name, [one.get(name, ABSENT) for one in settings]) for name in names]
    return settings_table(rows, ["", *run_labels([run.result for run in runs])])


def _settings_of(run: RunData) -> dict[str, str]:
    rows = {key: json_value(value) for key, value in run.config.items()}
    rows |= {key: json_value(run.result[key]) for key in ("backend", "seed") if key not in rows and key in run.result}
    for group, name in (("versions", "version"), ("machine", "machine")):
        found = run.result.get(group)
        items = found if isinstance(found, dict) else {"": found} if found else {}
        rows |= {f"{name} {key}".strip(): json_value(item) for key, item in items.items()}
    return rows
