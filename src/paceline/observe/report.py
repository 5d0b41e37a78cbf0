"""A self-contained HTML report of one or several runs: a headline, the table, the figures, and how to repeat it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.observe.compare import Column, evaluated_notes, failed, run_labels
from paceline.observe.document import Cell, Table, json_value, settings_table, write_page
from paceline.observe.figures import figures, method_colours
from paceline.observe.headline import caution, headline
from paceline.observe.words import ABSENT, number_text
from paceline.records.run_data import RunData
from paceline.records.summary import FRACTIONS

__all__ = ["runs_table", "write_report"]


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
        **runs_table(results),
        command=command,
        settings=_settings(runs),
    )


_STALENESS, _UNTIL = "staleness (updates)", "time (s) until the loss fell to"
_COLUMNS = (
    Column(name="workers", path=("workers",)),
    Column(name="seed", path=("seed",)),
    Column(name="throughput", unit="samples/s", path=("samples_per_s",), lower=False),
    Column(name="updates", path=("steps",)),
    Column(name="to target", unit="s", path=("time_to_target_s",), lower=True),
    *(
        Column(group=_UNTIL, name=f"{float(one) * 100:g} %", path=("time_to_fraction_s", one), lower=True)
        for one in FRACTIONS
    ),
    Column(name="loss", unit="training, end", path=("train_loss",), lower=True),
    Column(name="accuracy", unit="test, %", path=("test_accuracy",), lower=False, scale=100),
    Column(group=_STALENESS, name="mean", path=("staleness", "mean")),
    Column(group=_STALENESS, name="95 %", path=("staleness", "p95")),
    Column(group=_STALENESS, name="most", path=("staleness", "max")),
    Column(name="waiting", unit="% of time", path=("waiting_share",), scale=100),
    Column(name="dropped", unit="gradients", path=("dropped_updates",)),
)


def runs_table(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of every run, with notes; omits columns without values."""
    seeds = len({str(result.get("seed")) for result in results})
    columns = [one for one in _COLUMNS if any(value is not None for value in one.values(results))]
    columns = [one for one in columns if one.name != "seed" or seeds > 1]
    over, below = [Cell("method", kind="name", rows=2), Cell("outcome", kind="name", rows=2)], []
    for group, members in itertools.groupby(columns, key=lambda one: one.group or one):
        listed = list(members)
        if isinstance(group, str):
            over.append(Cell(group, columns=len(listed)))
            below += [Cell(one.name, one.unit) for one in listed]
        else:
            over.append(Cell(group.name, group.unit, rows=2))
    best = [one.best(results) for one in columns]
    texts = [[_text(one, value) for value in one.values(results)] for one in columns]
    names = [
        (Cell(label, colour=colour), _outcome(result))
        for label, colour, result in zip(run_labels(results), method_colours(results), results, strict=True)
    ]
    rows = [
        [*first, *(Cell(own[at], kind="best" if one == at else "") for own, one in zip(texts, best, strict=True))]
        for at, first in enumerate(names)
    ]
    notes = [
        "Bold: more than 5 % better than the next, among runs that ended well." if any(at is not None for at in best) else "",
        "A dash: not reached or not measured. Training loss: mean of the last 100 batches applied; times until it was reached"
        " count from the start of training.",
        *evaluated_notes(results),
        caution(results),
    ]  # fmt: skip
    return {"runs": Table(rows, over, below, kind="figures-table"), "notes": " ".join(filter(None, notes))}


def _text(column: Column, value: float | None) -> str:
    if value is None:
        return ABSENT
    if column.scale != 1:
        return f"{value:.1f}"
    return f"{value}" if column.name == "seed" else number_text(value)


def _outcome(result: dict[str, Any]) -> Cell:
    # A converged run's reason says that it reached its target, as the next columns do.
    reasons = [] if result.get("outcome") == "converged" else [str(result.get("outcome_reason") or "")]
    if lost := result.get("workers_lost"):
        reasons.append(f"lost: worker {', '.join(map(str, lost))}")
    return Cell(
        str(result.get("outcome", "unknown")), "; ".join(filter(None, reasons)),
        kind=f"outcome{' bad' if failed(result) else ''}",
    )  # fmt: skip


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
