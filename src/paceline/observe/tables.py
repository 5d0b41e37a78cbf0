"""Results as tables: of several runs side by side, for pages and for the terminal, and of one run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table
from rich.text import Text

from paceline.observe.compare import clearly_best, evaluated_notes, failed, figure, run_labels, target_text
from paceline.observe.document import Cell, Table
from paceline.observe.terminal import OUTCOMES, shown
from paceline.observe.words import ABSENT, counted, number_text, percent_text, workers_text
from paceline.records.summary import FRACTIONS

__all__ = ["comparison_table", "result_table", "runs_table"]

_Results = Sequence[Mapping[str, Any]]
_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of every run, as a table's column.

    Args:
        lower: whether lower is better; None: neither is.
        group: above the headings of several columns.
        narrow: the heading in a terminal; "" for columns of pages only.
    """

    name: str
    unit: str
    path: tuple[str, ...]
    lower: bool | None = None
    scale: float = 1
    group: str = ""
    narrow: str = ""

    def values(self, results: _Results) -> list[float | None]:
        found = [figure(result, *self.path) for result in results]
        return found if self.scale == 1 else [None if value is None else value * self.scale for value in found]

    def cells(self, results: _Results) -> list[Cell]:
        """One cell for each run; the kind "best" marks the run that is clearly better than all others that ended well."""
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
    # A converged run's reason says that it reached its target, as the next columns do.
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
    heads = [Cell("method"), Cell("outcome", kind="name"), *(Cell(one.narrow) for one in columns)]
    rows = [list(row) for row in _rows(results, columns, list(map(Cell, names)), [_outcome(one) for one in results])]
    made = shown(Table(rows, heads))
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
    made.caption = Text("\n".join(notes)) if notes else None
    return made


def _deepest_fraction(results: _Results) -> str | None:
    """The smallest fraction of the initial loss that any run that ended well has reached."""
    for fraction in sorted(FRACTIONS, key=float):
        if any(figure(result, "time_to_fraction_s", fraction) is not None for result in results if not failed(result)):
            return fraction
    return None


def result_table(result: Mapping[str, Any]) -> table.Table:
    """The figures of one run, one per line."""
    made = table.Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    outcome = str(result.get("outcome", "unknown"))
    reason = f": {result['outcome_reason']}" if result.get("outcome_reason") else ""
    made.add_row("outcome", Text(outcome, OUTCOMES.get(outcome, "")).append(reason, "not bold default"))
    for name, text in _lines(result):
        if text is not None:
            made.add_row(name, Text(text))
    return made


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Names and texts; None leaves the line out."""

    def said(key: str, text: Callable[[float], str] = number_text) -> str | None:
        return None if (value := figure(result, key)) is None else text(value)

    def some(key: str, text: Callable[[float], str] = number_text) -> str | None:
        return said(key, text) if result.get(key) else None

    gossip = result.get("gossip")
    told = result.get("outcome_reason") or ""
    return [
        ("time to target", _time_to_target(result)),
        ("training time", said("wall_s", lambda value: f"{number_text(value)} s")),
        ("throughput", said("samples_per_s", lambda value: f"{number_text(value)} samples/s")),
        ("updates", said("steps")),
        ("training loss", said("train_loss", lambda value: f"{number_text(value)} (mean of the last 100 batches)")),
        ("test accuracy", said("test_accuracy", percent_text)),
        ("waiting", said("waiting_share", lambda value: f"{percent_text(value)} of the workers' time")),
        ("evaluated", str(result["evaluated"]) if result.get("evaluated") else None),
        ("staleness", _staleness(result)),
        (
            "consensus distance",
            said(
                "consensus_distance", lambda one: f"{number_text(one)} (mean square distance of a model from the mean)"
            ),
        ),
        ("worst worker's own", said("worst_worker_accuracy", lambda value: f"{percent_text(value)} test accuracy")),
        ("averages", _averages(result)),
        ("late averages", _late(result) if result.get("delay") else None),
        ("chosen by auto", _chosen(result.get("chosen_gradients"))),
        ("sent per gradient", _sent(result)),
        ("bits per element", some("bits_per_element")),
        ("coding", said("codec_share", lambda value: f"{percent_text(value)} of the workers' time")),
        ("fewest updates", _fewest_updates(result) if gossip else None),
        ("failed exchanges", some("peer_failures")),
        ("unresolved exchanges", some("unresolved_exchanges")),
        ("updates per worker", _updates(result.get("updates_per_worker") or [])),
        ("batch sizes", _batch_sizes(result.get("batch_sizes") or [])),
        ("ideal step", some("ideal_step_s", lambda value: f"{1e3 * value:.3g} ms, without waiting")),
        # With gossip every gradient is applied, to the worker's own model.
        ("dropped gradients", None if gossip else said("dropped_updates")),
        ("failed publishes", None if gossip else said("failed_publishes")),
        ("workers lost", ", ".join(map(str, result.get("workers_lost") or ())) or None),
        ("records lost", some("records_lost")),
        *(("note", str(note)) for note in result.get("notes") or () if note not in told),
    ]


def _time_to_target(result: Mapping[str, Any]) -> str | None:
    time_s, steps = figure(result, "time_to_target_s"), figure(result, "steps_to_target")
    if time_s is not None:
        return f"{number_text(time_s)} s" + ("" if steps is None else f" ({steps:,.0f} updates)")
    goal = target_text(result)
    return None if goal == "the target" else f"not reached ({goal.removeprefix('the target ')})"


def _staleness(result: Mapping[str, Any]) -> str | None:
    mean, p95, most = (figure(result, "staleness", key) for key in ("mean", "p95", "max"))
    tail = "" if p95 is None or most is None else f", 95 % at most {p95:.0f}, most {most:.0f}"
    return None if mean is None else f"mean {mean:.2f}{tail} updates"


def _averages(result: Mapping[str, Any]) -> str | None:
    averages = figure(result, "averages_per_step")
    return f"{averages:.2f} per gradient, counted at every worker that takes part" if averages else None


def _late(result: Mapping[str, Any]) -> str | None:
    delay, factor = figure(result, "delay"), figure(result, "progress_factor")
    kept = "" if factor is None else f", which leaves {factor:.2f} of the progress"
    return None if delay is None else f"by {counted(round(delay), 'step')}{kept}"


def _chosen(chosen: Any) -> str | None:
    """The last chosen number, and the range of all."""
    last, fewest, most = (figure({"chosen": chosen}, "chosen", key) for key in ("last", "fewest", "most"))
    if last is None or fewest is None or most is None:
        return None
    before = f", {fewest:.0f} to {most:.0f} in all" if most > fewest else ""
    return f"{counted(round(last), 'gradient')} at the end{before}"


def _sent(result: Mapping[str, Any]) -> str | None:
    messages, sent_bytes = figure(result, "messages_per_step"), figure(result, "bytes_per_step")
    return f"{messages:.2f} messages, {number_text(sent_bytes)} bytes" if messages and sent_bytes is not None else None


def _fewest_updates(result: Mapping[str, Any]) -> str | None:
    shares = result.get("share_of_updates") or ()
    if len(shares) < 2:
        return None
    least = min(range(len(shares)), key=shares.__getitem__)
    return f"{shares[least]:.2%} of all, by worker {least}"


def _updates(counts: Sequence[int]) -> str | None:
    more = ", ..." if len(counts) > _MOST_WORKERS else ""
    return ", ".join(f"{count:,}" for count in counts[:_MOST_WORKERS]) + more or None


def _batch_sizes(changes: Sequence[Mapping[str, Any]]) -> str | None:
    """The last batch sizes, and how often they changed."""
    if not changes:
        return None
    times = len(changes) - 1
    return f"{_updates(changes[-1]['sizes'])} samples, by worker, after {times} change{'s' * (times != 1)}"
