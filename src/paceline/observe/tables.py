"""Results as tables for the terminal: one run, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from paceline.observe.compare import (
    ABSENT,
    clearly_best,
    evaluated_notes,
    failed,
    figure,
    number_text,
    percent_text,
    run_labels,
    target_text,
    workers_text,
)
from paceline.records.summary import FRACTIONS

__all__ = ["comparison_table", "result_table"]

_OUTCOME_STYLES = {"converged": "green", "stopped": "yellow", "diverged": "bold red", "crashed": "bold red"}


def comparison_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run. Bold green marks a value more than 5 % better than the next among runs that ended well.

    Args:
        results: the runs' results; missing figures show as a dash, a column that no run has a value for is left out.
    """
    table = Table(header_style="bold", caption_justify="left", caption_style="dim", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.show_edge = False
    table.add_column("method", overflow="fold", min_width=12)
    table.add_column("outcome", no_wrap=True)
    # (header, path, whether lower is better or None if neither is, scale)
    columns: list[tuple[str, tuple[str, ...], bool | None, float]] = [
        ("samples\n/s", ("samples_per_s",), False, 1),
        ("target\n(s)", ("time_to_target_s",), True, 1),
        ("train\nloss", ("train_loss",), True, 1),
        ("accu-\nracy\n(%)", ("test_accuracy",), False, 100),
        ("stale-\nness\nmean", ("staleness", "mean"), None, 1),
        ("wait-\ning\n(%)", ("waiting_share",), None, 100),
    ]
    fraction = _deepest_fraction(results)
    if fraction is not None and not any(figure(result, "time_to_target_s") is not None for result in results):
        columns[1] = (f"to {float(fraction) * 100:g} %\nof loss\n(s)", ("time_to_fraction_s", fraction), True, 1)
    workers = {result.get("workers") for result in results}
    if len(workers) > 1:
        columns.insert(0, ("work-\ners", ("workers",), None, 1))
    if any(figure(result, "dropped_updates") for result in results):
        columns.append(("drop-\nped", ("dropped_updates",), None, 1))
    shown = [column for column in columns if any(figure(result, *column[1]) is not None for result in results)]
    texts: list[list[Text]] = []
    any_best = False
    for header, path, lower, scale in shown:
        table.add_column(header, justify="right", no_wrap=True)
        values = [figure(result, *path) for result in results]
        eligible = [None if failed(result) else value for value, result in zip(values, results, strict=True)]
        best = None if lower is None else clearly_best(eligible, lower=lower)
        any_best = any_best or best is not None
        texts.append(
            [Text(_cell(value, scale), style="bold green" if row == best else "") for row, value in enumerate(values)]
        )
    for row, (label, result) in enumerate(zip(run_labels(results), results, strict=True)):
        if len(workers) > 1:  # in a column of its own
            label = label.replace(f" · {workers_text(result.get('workers', 0))}", "")
        table.add_row(Text(label), _outcome(result), *(column[row] for column in texts))
    notes = [
        f"{label}: {result['outcome_reason']}"
        for label, result in zip(run_labels(results), results, strict=True)
        if result.get("outcome") != "converged" and result.get("outcome_reason")
    ]
    notes += evaluated_notes(results)
    if len(workers) == 1 and (number := workers.pop()) is not None:
        notes.append(f"{workers_text(number)} each.")
    if any_best:
        notes.append("Bold: more than 5 % better than the next.")
    if notes:
        table.caption = Text("\n".join(notes))
    return table


def result_table(result: Mapping[str, Any]) -> Table:
    """The figures of one run, one a line."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("outcome", _outcome(result, with_reason=True))
    for name, text in _lines(result):
        table.add_row(name, Text(text))
    return table


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []

    def line(name: str, value: float | None, unit: str = "", note: str = "") -> None:
        if value is not None:
            lines.append((name, " ".join(part for part in (number_text(value), unit, note) if part)))

    steps_to_target = figure(result, "steps_to_target")
    note = f"({steps_to_target:,.0f} updates)" if steps_to_target is not None else ""
    if result.get("time_to_target_s") is None and (goal := target_text(result)) != "the target":
        lines.append(("time to target", f"not reached ({goal.removeprefix('the target ')})"))
    line("time to target", figure(result, "time_to_target_s"), "s", note)
    line("training time", figure(result, "wall_s"), "s")
    line("throughput", figure(result, "samples_per_s"), "samples/s")
    line("updates", figure(result, "steps"))
    line("training loss", figure(result, "train_loss"), "", "(mean of the last 100 batches)")
    for name, key in (("test accuracy", "test_accuracy"), ("waiting", "waiting_share")):
        value = figure(result, key)
        if value is not None:
            lines.append((name, percent_text(value) + (" of the workers' time" if key == "waiting_share" else "")))
    if result.get("evaluated"):
        lines.append(("evaluated", str(result["evaluated"])))
    mean, p95, most = (figure(result, "staleness", key) for key in ("mean", "p95", "max"))
    if mean is not None:
        tail = "" if p95 is None or most is None else f", 95 % at most {p95:.0f}, most {most:.0f}"
        lines.append(("staleness", f"mean {mean:.2f}{tail} updates"))
    line(
        "consensus distance",
        figure(result, "consensus_distance"),
        "",
        "(mean square distance of a model from the mean)",
    )
    worst = figure(result, "worst_worker_accuracy")
    if worst is not None:
        lines.append(("worst worker's own", f"{percent_text(worst)} test accuracy"))
    averages = figure(result, "averages_per_step")
    if averages:
        lines.append(("averages", f"{averages:.2f} per gradient, counted at every worker that takes part"))
    messages, sent_bytes = figure(result, "messages_per_step"), figure(result, "bytes_per_step")
    if messages and sent_bytes is not None:
        lines.append(("sent per gradient", f"{messages:.2f} messages, {number_text(sent_bytes)} bytes"))
    shares = result.get("share_of_updates")
    if result.get("gossip") and shares and len(shares) > 1:
        least = min(range(len(shares)), key=shares.__getitem__)
        lines.append(("fewest updates", f"{shares[least]:.2%} of all, by worker {least}"))
    if result.get("peer_failures"):
        line("failed exchanges", figure(result, "peer_failures"))
    if result.get("unresolved_exchanges"):
        line("unresolved exchanges", figure(result, "unresolved_exchanges"))
    updates = result.get("updates_per_worker")
    if updates:
        shown = ", ".join(f"{count:,}" for count in updates[:16]) + (", ..." if len(updates) > 16 else "")
        lines.append(("updates per worker", shown))
    if not result.get("gossip"):  # there every gradient is applied, to the worker's own model
        line("dropped gradients", figure(result, "dropped_updates"))
        line("failed publishes", figure(result, "failed_publishes"))
    if result.get("workers_lost"):
        lines.append(("workers lost", ", ".join(map(str, result["workers_lost"]))))
    if result.get("records_lost"):
        line("records lost", figure(result, "records_lost"))
    told = result.get("outcome_reason") or ""
    lines.extend(("note", str(note)) for note in result.get("notes") or () if note not in told)
    return lines


def _outcome(result: Mapping[str, Any], *, with_reason: bool = False) -> Text:
    outcome = str(result.get("outcome", "unknown"))
    text = Text(outcome, style=_OUTCOME_STYLES.get(outcome, ""))
    if with_reason and result.get("outcome_reason"):
        text.append(f": {result['outcome_reason']}", style="not bold default")
    return text


def _cell(value: float | None, scale: float) -> str:
    if value is None:
        return ABSENT
    if scale != 1:
        return f"{value * scale:.1f}"
    return number_text(value, 3 if abs(value) < 1e6 or isinstance(value, int) else 2)


def _deepest_fraction(results: Sequence[Mapping[str, Any]]) -> str | None:
    """The smallest fraction of the initial loss that a run which ended well has reached."""
    for fraction in sorted(FRACTIONS, key=float):
        if any(figure(result, "time_to_fraction_s", fraction) is not None for result in results if not failed(result)):
            return fraction
    return None
