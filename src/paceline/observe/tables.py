"""Results as tables: several runs side by side, for pages and terminals, and one run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import table
from rich.text import Text

from paceline.observe.compare import clearly_best, evaluated_notes, failed, figure, run_labels, target_text
from paceline.observe.document import Cell, Table, markup
from paceline.observe.terminal import OUTCOMES, terminal_table
from paceline.observe.words import ABSENT, number_text, workers_text
from paceline.records.summary import FRACTIONS

_Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of every run, as a table's column."""

    name: str
    unit: str
    path: tuple[str, ...]
    lower: bool | None = None  # whether lower is better; None: neither is
    scale: float = 1
    group: str = ""  # above the headings of several columns
    narrow: str = ""  # the heading in a terminal; "" for columns of pages only

    def values(self, results: _Results) -> list[float | None]:
        found = [figure(result, *self.path) for result in results]
        return found if self.scale == 1 else [None if value is None else value * self.scale for value in found]

    def cells(self, results: _Results) -> list[Cell]:
        """One cell for each run; the kind "best" marks a run clearly better than all others that did not fail."""
        values, best = self.values(results), None
        if self.lower is not None:
            well = [None if failed(run) else value for run, value in zip(results, values, strict=True)]
            best = clearly_best(well, lower=self.lower)
        return [Cell(self._text(value), kind="best" if at == best else "") for at, value in enumerate(values)]

    def _text(self, value: float | None) -> str:
        if value is None:
            return ABSENT
        if self.scale != 1:
            return f"{value:.1f}"
        return f"{value}" if self.name == "seed" else number_text(value)


_STALENESS, _UNTIL = "staleness (updates)", "time (s) until the loss fell to"
_TARGET = Column("to target", "s", ("time_to_target_s",), lower=True, narrow="target\n(s)")
_FRACTIONS = {
    one: Column(
        f"{float(one) * 100:g} %", "", ("time_to_fraction_s", one), lower=True, group=_UNTIL,
        narrow=f"to {float(one) * 100:g} %\nof loss\n(s)",
    ) for one in FRACTIONS
}  # fmt: skip
_COLUMNS = (
    Column("workers", "", ("workers",), narrow="work-\ners"),
    Column("seed", "", ("seed",)),
    Column("throughput", "samples/s", ("samples_per_s",), lower=False, narrow="samples\n/s"),
    Column("updates", "", ("steps",)),
    _TARGET,
    *_FRACTIONS.values(),
    Column("loss", "training, end", ("train_loss",), lower=True, narrow="train\nloss"),
    Column("accuracy", "test, %", ("test_accuracy",), lower=False, scale=100, narrow="accu-\nracy\n(%)"),
    Column("mean", "", ("staleness", "mean"), group=_STALENESS, narrow="stale-\nness\nmean"),
    Column("95 %", "", ("staleness", "p95"), group=_STALENESS),
    Column("most", "", ("staleness", "max"), group=_STALENESS),
    Column("waiting", "% of time", ("waiting_share",), scale=100, narrow="wait-\ning\n(%)"),
    Column("dropped", "gradients", ("dropped_updates",), narrow="drop-\nped"),
)


def _columns(results: _Results) -> list[Column]:
    """The columns with a value for at least one run, and the seeds only if there are several."""
    seeds = len({str(result.get("seed")) for result in results})
    known = (one for one in _COLUMNS if any(value is not None for value in one.values(results)))
    return [one for one in known if one.name != "seed" or seeds > 1]


def _rows(results: _Results, columns: Sequence[Column], names: Sequence[Cell], outcomes: Sequence[Cell]) -> Any:
    return zip(names, outcomes, *(one.cells(results) for one in columns), strict=True)


def runs_table(results: _Results, colours: Sequence[str]) -> Table:
    """One row per run, for a page; `colours` are those of the runs in its figures."""
    columns = _columns(results)
    over, below = [Cell("method", kind="name", rows=2), Cell("outcome", kind="name", rows=2)], []
    for group, members in itertools.groupby(columns, key=lambda one: one.group or one):
        listed = list(members)
        if isinstance(group, str):
            over.append(Cell(group, columns=len(listed)))
            below += [Cell(one.name, one.unit) for one in listed]
        else:
            over.append(Cell(group.name, group.unit, rows=2))
    labels = zip(run_labels(results), colours, strict=True)
    names = [Cell(label, colour=colour) for label, colour in labels]
    return Table(_rows(results, columns, names, [_outcome(one) for one in results]), over, below, kind="figures-table")


def _outcome(result: Mapping[str, Any]) -> Cell:
    # The reason of a converged run repeats the next columns.
    reasons = [] if result.get("outcome") == "converged" else [str(result.get("outcome_reason") or "")]
    if lost := result.get("workers_lost"):
        reasons.append(f"lost: worker {', '.join(map(str, lost))}")
    return Cell(
        str(result.get("outcome", "unknown")), "; ".join(filter(None, reasons)),
        kind=f"outcome{' bad' if failed(result) else ''}",
    )  # fmt: skip


def comparison_table(results: _Results) -> table.Table:
    """One row per run, for a terminal; columns without any value are left out."""
    workers = {result.get("workers") for result in results}
    time = _TARGET
    if not any(value is not None for value in _TARGET.values(results)):
        time = _FRACTIONS.get(str(_deepest_fraction(results)), _TARGET)
    columns = [
        one
        for one in _columns(results)
        if one is time or (one.narrow and one is not _TARGET and one.group != _UNTIL)
        if one.name != "workers" or len(workers) > 1
        if one.name != "dropped" or any(one.values(results))
    ]
    labels = run_labels(results)
    names = labels
    if len(workers) > 1:  # in a separate column
        pairs = zip(labels, results, strict=True)
        names = [label.replace(f" · {workers_text(result.get('workers', 0))}", "") for label, result in pairs]
    heads = [Cell("method", kind="name"), Cell("outcome", kind="name"), *(Cell(one.narrow) for one in columns)]
    rows = [list(row) for row in _rows(results, columns, list(map(Cell, names)), [_outcome(one) for one in results])]
    notes = [
        f"{label}: {result['outcome_reason']}"
        for label, result in zip(labels, results, strict=True)
        if result.get("outcome") != "converged" and result.get("outcome_reason")
    ]
    notes += evaluated_notes(results)
    if len(workers) == 1 and (number := workers.pop()) is not None:
        notes.append(f"{workers_text(number)} each.")
    if any(cell.kind == "best" for row in rows for cell in row):
        notes.append("Bold: more than 5 % better than the next.")
    return terminal_table(Table(rows, heads), notes=notes)


def _deepest_fraction(results: _Results) -> str | None:
    """The smallest fraction of the initial loss that a run without failure reached."""
    well = [result for result in results if not failed(result)]
    reached = (one for one in FRACTIONS if any(figure(run, "time_to_fraction_s", one) is not None for run in well))
    return min(reached, key=float, default=None)


def result_table(result: Mapping[str, Any]) -> table.Table:
    """The figures of one run, one per line."""
    made = table.Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    outcome = str(result.get("outcome", "unknown"))
    reason = f": {result['outcome_reason']}" if result.get("outcome_reason") else ""
    made.add_row("outcome", Text(outcome, OUTCOMES.get(outcome, "")).append(reason, "not bold default"))
    lines = markup("observe/result.txt", result=result, figure=partial(figure, result), target=target_text(result))
    for name, _, text in (line.partition(": ") for line in lines.split("\n") if line):
        made.add_row(name, Text(text))
    return made
