"""One HTML file about one run or several: a headline, the table, the figures, and how to repeat it. Works offline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.observe.compare import Column, evaluated_notes, failed, group_runs, run_labels
from paceline.observe.document import figure_html, write_page
from paceline.observe.figures import figures, method_colours
from paceline.observe.headline import caution, headline
from paceline.observe.markup import (
    cell,
    escape,
    head,
    json_value,
    paragraphs,
    preformatted,
    row_name,
    settings_table,
    table,
)
from paceline.observe.words import ABSENT, number_text
from paceline.records.run_data import RunData
from paceline.records.summary import FRACTIONS

__all__ = ["runs_table", "write_report"]


def write_report(
    runs: Sequence[RunData], path: str | Path, *, title: str | None = None, command: str | None = None
) -> Path:
    """Write a self-contained report; several runs are compared.

    Costs about 5 MB on disk, nearly all of it plotly.js, and a second or two for long runs.

    Args:
        runs: the runs, in the order in which the table should list them.
        path: the HTML file.
        title: heading; by default the task and the methods.
        command: the exact command that made the runs; by default each run's own.

    Returns:
        The path.
    """
    runs = [_complete(run) for run in runs]
    results = [run.result for run in runs]
    drawn = figures(runs)
    parts = [
        runs_table(results),
        *map(figure_html, drawn),
        "" if drawn else "<p>The runs have no step records, so there are no figures.</p>",
        _provenance(runs, command),
    ]
    return write_page(
        path,
        title=title or _title(results),
        answer=paragraphs("answer", [headline(results)]),
        body="\n".join(parts),
        figures=drawn,
        kind="run",
    )


def _complete(run: RunData) -> RunData:
    """What the configuration says counts where the result is silent."""
    return RunData(run.config, {**run.config, **run.result}, run.records, run.evaluations)


def _title(results: Sequence[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(str(result.get("task", "a task")) for result in results))
    methods = [group.label for group in group_runs(results)]
    return f"{', '.join(tasks)}: {', '.join(methods[:4])}{' and others' if len(methods) > 4 else ''}"


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


def runs_table(results: Sequence[dict[str, Any]]) -> str:
    """The figures of every run; a column that no run has a value for is left out."""
    seeds = len({str(result.get("seed")) for result in results})
    columns = [one for one in _COLUMNS if any(value is not None for value in one.values(results))]
    columns = [one for one in columns if one.name != "seed" or seeds > 1]
    alone = ' rowspan="2"'
    over = [head("method", named=True, more=alone), head("outcome", named=True, more=alone)]
    below = []
    for group, members in itertools.groupby(columns, key=lambda one: one.group or one):
        listed = list(members)
        if isinstance(group, str):
            over.append(f'<th colspan="{len(listed)}"><span>{escape(group)}</span></th>')
            below += [head(one.name, one.unit) for one in listed]
        else:
            over.append(head(group.name, group.unit, more=alone))
    best = [one.best(results) for one in columns]
    columns_texts = [[_text(one, value) for value in one.values(results)] for one in columns]
    rows = [
        [
            row_name(label, colour),
            _outcome(result),
            *(
                cell(texts[row], kind="best" if at == row else "")
                for texts, at in zip(columns_texts, best, strict=True)
            ),
        ]
        for row, (label, colour, result) in enumerate(
            zip(run_labels(results), method_colours(results), results, strict=True)
        )
    ]
    bold = "Bold: more than 5 % better than the next, among runs that ended well. "
    notes = "".join(f" {escape(one)}" for one in [*evaluated_notes(results), caution(results)] if one)
    return (
        f"<h2>Figures of each run</h2>\n{table([*over, '</tr><tr>', *below], rows, kind='figures-table')}\n"
        f"<figcaption>{bold if any(at is not None for at in best) else ''}A dash: not reached or not measured. Training loss:"
        " mean of the last 100 batches applied; times until it was reached count from the start of"
        f" training.{notes}</figcaption>"
    )


def _text(column: Column, value: float | None) -> str:
    if value is None:
        return ABSENT
    if column.scale != 1:
        return f"{value:.1f}"
    return f"{value}" if column.name == "seed" else number_text(value)


def _outcome(result: dict[str, Any]) -> str:
    # A converged run's reason says that it reached its target, as the next columns do.
    reasons = [] if result.get("outcome") == "converged" else [str(result.get("outcome_reason") or "")]
    if lost := result.get("workers_lost"):
        reasons.append(f"lost: worker {', '.join(map(str, lost))}")
    return cell(
        str(result.get("outcome", "unknown")), "; ".join(filter(None, reasons)),
        kind=f"outcome{' bad' if failed(result) else ''}",
    )  # fmt: skip


def _provenance(runs: Sequence[RunData], command: str | None) -> str:
    results = [run.result for run in runs]
    own = dict.fromkeys(str(result["command"]) for result in results if result.get("command"))
    settings = [_settings(run) for run in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [(name, [one.get(name, ABSENT) for one in settings]) for name in names]
    commands = command or "\n".join(own)
    return (
        f"<h2>How to repeat it</h2>\n{preformatted(commands)}"
        f"<h2>Settings, versions and machine</h2>\n{settings_table(rows, ['', *run_labels(results)])}"
    )


def _settings(run: RunData) -> dict[str, str]:
    """The run's configuration, and what its result adds: where it ran, with which versions."""
    rows = {key: json_value(value) for key, value in run.config.items()}
    rows |= {key: json_value(run.result[key]) for key in ("backend", "seed") if key not in rows and key in run.result}
    for group, name in (("versions", "version"), ("machine", "machine")):
        found = run.result.get(group)
        items = found if isinstance(found, dict) else {"": found} if found else {}
        rows |= {f"{name} {key}".strip(): json_value(item) for key, item in items.items()}
    return rows
