"""A finished run's folder, and the self-contained HTML report of one or several runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import NotWrittenError
from paceline.observe.blame import NOTE, blame, sentence, table
from paceline.observe.compare import caution, evaluated_notes, headline, run_labels
from paceline.observe.document import Table, json_value, settings_table, write_page
from paceline.observe.figures import figures, method_colours
from paceline.observe.tables import runs_table
from paceline.observe.trace import write_trace
from paceline.observe.words import ABSENT
from paceline.records.run_data import RunData, write_json


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
        **_slow_worker(runs),
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


def _slow_worker(runs: Sequence[RunData]) -> dict[str, Any]:
    """A sentence on the worker that slowed each run; for a single run also a table of each worker's time."""
    found = [blame(run) for run in runs]
    labels = run_labels([run.result for run in runs])
    said = [(label, sentence(one)) for label, one in zip(labels, found, strict=True) if one and len(one.shares) > 1]
    only = found[0] if len(found) == 1 and said else None
    return {
        "blamed": [text if len(runs) == 1 else f"{label}: {text}" for label, text in said],
        "shares": table(only) if only else Table([]),
        "shares_note": NOTE,
    }


def _settings(runs: Sequence[RunData]) -> Table:
    """The configurations, with machine and versions from the results."""
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


def write_run(
    run: RunData,
    folder: Path,
    *,
    title: str,
    command: str,
    recorded: Mapping[int, np.ndarray] | None = None,
    host: dict[str, Any] | None = None,
) -> None:
    """Write the folder of a finished run.

    Args:
        run: for the trace and the report.
        folder: created if missing.
        title: of the report.
        command: for the report.
        recorded: the records to save, if they are not the run's.
        host: of a simulation, for `host.json`: facts that depend on where and when it ran.

    Raises:
        NotWrittenError: a file cannot be written. If it is one of the measurements, the folder is like that of a killed run;
            otherwise only the trace or the report is missing. The error's `run` is this run.
    """
    try:
        (run if recorded is None else dataclasses.replace(run, records=dict(recorded))).save(folder)
        with contextlib.ExitStack() as stack:  # tries the others if one fails
            if host is not None:
                stack.callback(write_json, folder / "host.json", host)
            stack.callback(write_trace, run, folder / "trace.json")
            stack.callback(write_report, [run], folder / "report.html", title=title, command=command)
    except NotWrittenError as error:
        error.run = run
        raise
