"""Results as tables for the terminal: one run, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.compare import Column, evaluated_notes, failed, figure, run_labels, target_text
from paceline.observe.terminal import BEST, figures_table
from paceline.observe.words import ABSENT, counted, number_text, percent_text, workers_text
from paceline.records.summary import FRACTIONS

__all__ = ["comparison_table", "result_table"]

_OUTCOME_STYLES = {"converged": "green", "stopped": "yellow", "diverged": "bold red", "crashed": "bold red"}
_MOST_WORKERS = 16


def comparison_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run. Bold green marks a value that is more than 5 % better than the next among runs that ended well.

    Args:
        results: the runs' results; missing values show as a dash; columns without any value are left out.
    """
    workers = {result.get("workers") for result in results}
    columns = _columns(results, with_workers=len(workers) > 1)
    table = figures_table("method", [one.name for one in columns], words=["outcome"])
    best = [one.best(results) for one in columns]
    texts = [[_cell(one, value) for value in one.values(results)] for one in columns]
    labels = run_labels(results)
    for row, (label, result) in enumerate(zip(labels, results, strict=True)):
        if len(workers) > 1:  # in a separate column
            label = label.replace(f" · {workers_text(result.get('workers', 0))}", "")
        cells = [Text(own[row], BEST if at == row else "") for own, at in zip(texts, best, strict=True)]
        table.add_row(Text(label), _outcome(result), *cells)
    notes = [
        f"{label}: {result['outcome_reason']}"
        for label, result in zip(labels, results, strict=True)
        if result.get("outcome") != "converged" and result.get("outcome_reason")
    ]
    notes += evaluated_notes(results)
    if len(workers) == 1 and (number := workers.pop()) is not None:
        notes.append(f"{workers_text(number)} each.")
    if any(at is not None for at in best):
        notes.append("Bold: more than 5 % better than the next.")
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def _columns(results: Sequence[Mapping[str, Any]], *, with_workers: bool) -> list[Column]:
    """The columns with a value for at least one run."""
    time = Column(name="target\n(s)", path=("time_to_target_s",), lower=True)
    fraction = _deepest_fraction(results)
    if fraction is not None and not any(value is not None for value in time.values(results)):
        name = f"to {float(fraction) * 100:g} %\nof loss\n(s)"
        time = Column(name=name, path=("time_to_fraction_s", fraction), lower=True)
    columns = [
        *([Column(name="work-\ners", path=("workers",))] if with_workers else []),
        Column(name="samples\n/s", path=("samples_per_s",), lower=False),
        time,
        Column(name="train\nloss", path=("train_loss",), lower=True),
        Column(name="accu-\nracy\n(%)", path=("test_accuracy",), lower=False, scale=100),
        Column(name="stale-\nness\nmean", path=("staleness", "mean")),
        Column(name="wait-\ning\n(%)", path=("waiting_share",), scale=100),
    ]
    if any(figure(result, "dropped_updates") for result in results):
        columns.append(Column(name="drop-\nped", path=("dropped_updates",)))
    return [one for one in columns if any(value is not None for value in one.values(results))]


def result_table(result: Mapping[str, Any]) -> Table:
    """The figures of one run, one per line."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("outcome", _outcome(result, with_reason=True))
    for name, text in _lines(result):
        if text is not None:
            table.add_row(name, Text(text))
    return table


def _lines(result: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Names and texts; None leaves the line out."""

    def said(key: str, text: Callable[[float], str] = number_text) -> str | None:
        return None if (value := figure(result, key)) is None else text(value)

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
        ("bits per element", said("bits_per_element") if result.get("bits_per_element") else None),
        ("coding", said("codec_share", lambda value: f"{percent_text(value)} of the workers' time")),
        ("fewest updates", _fewest_updates(result) if gossip else None),
        ("failed exchanges", said("peer_failures") if result.get("peer_failures") else None),
        ("unresolved exchanges", said("unresolved_exchanges") if result.get("unresolved_exchanges") else None),
        ("updates per worker", _updates(result.get("updates_per_worker") or [])),
        ("batch sizes", _batch_sizes(result.get("batch_sizes") or [])),
        (
            "ideal step",
            said("ideal_step_s", lambda value: f"{1e3 * value:.3g} ms, without waiting")
            if result.get("ideal_step_s")
            else None,
        ),
        # With gossip every gradient is applied, to the worker's own model.
        ("dropped gradients", None if gossip else said("dropped_updates")),
        ("failed publishes", None if gossip else said("failed_publishes")),
        ("workers lost", ", ".join(map(str, result.get("workers_lost") or ())) or None),
        ("records lost", said("records_lost") if result.get("records_lost") else None),
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


def _outcome(result: Mapping[str, Any], *, with_reason: bool = False) -> Text:
    outcome = str(result.get("outcome", "unknown"))
    text = Text(outcome, style=_OUTCOME_STYLES.get(outcome, ""))
    if with_reason and result.get("outcome_reason"):
        text.append(f": {result['outcome_reason']}", style="not bold default")
    return text


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        return ABSENT
    if column.scale != 1:
        return f"{value:.1f}"
    return number_text(value, 3 if abs(value) < 1e6 or isinstance(value, int) else 2)


def _deepest_fraction(results: Sequence[Mapping[str, Any]]) -> str | None:
    """The smallest fraction of the initial loss that any run that ended well has reached."""
    for fraction in sorted(FRACTIONS, key=float):
        if any(figure(result, "time_to_fraction_s", fraction) is not None for result in results if not failed(result)):
            return fraction
    return None
