"""One HTML file about one run or several: the answer, the table, the figures, and how to repeat it. Works offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.observe.answer import answer
from paceline.observe.compare import (
    ABSENT,
    clearly_best,
    evaluated_notes,
    failed,
    figure,
    group_runs,
    number_text,
    run_labels,
)
from paceline.observe.document import breakable, escape, figure_html, prose, swatch, write_page
from paceline.observe.figures import figures, method_colours
from paceline.records.run_data import RunData
from paceline.records.summary import FRACTIONS

__all__ = ["write_report"]

_CAUTIONS = ("One run", "Medians of")


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
        _table(results),
        *(figure_html(one) for one in drawn),
        "" if drawn else "<p>The runs have no step records, so there are no figures.</p>",
        _provenance(runs, command),
    ]
    return write_page(
        path, title=title or _title(results), answer=_answer(results), body="\n".join(parts), figures=drawn
    )


def _complete(run: RunData) -> RunData:
    """What the configuration says counts where the result is silent."""
    return RunData(run.config, {**run.config, **run.result}, run.records, run.evaluations)


def _title(results: Sequence[dict[str, Any]]) -> str:
    tasks = list(dict.fromkeys(str(result.get("task", "a task")) for result in results))
    methods = [group.label for group in group_runs(results)]
    return f"{', '.join(tasks)}: {', '.join(methods[:4])}{' and others' if len(methods) > 4 else ''}"


def _answer(results: Sequence[dict[str, Any]]) -> str:
    sentences = answer(results)
    classes = ["answer", *("why" for _ in sentences[1:])]
    return "\n".join(
        f'<p class="{"caution" if sentence.startswith(_CAUTIONS) else kind}">{prose(sentence)}</p>'
        for sentence, kind in zip(sentences, classes, strict=True)
    )


def _table(results: Sequence[dict[str, Any]]) -> str:
    """The figures of every run; a column that no run has a value for is left out."""
    columns: list[
        tuple[str, str, str, list[float | None], bool | None]
    ] = []  # group, header, unit, values, lower is best

    def column(group: str, header: str, unit: str, path: tuple[str, ...], lower: bool | None, scale: float = 1) -> None:
        values = [figure(result, *path) for result in results]
        if any(value is not None for value in values):
            columns.append((group, header, unit, [v if v is None or scale == 1 else v * scale for v in values], lower))

    column("", "workers", "", ("workers",), None)
    if len({str(result.get("seed")) for result in results}) > 1:
        column("", "seed", "", ("seed",), None)
    column("", "throughput", "samples/s", ("samples_per_s",), False)
    column("", "updates", "", ("steps",), None)
    column("", "to target", "s", ("time_to_target_s",), True)
    for fraction in FRACTIONS:
        path = ("time_to_fraction_s", fraction)
        column("time (s) until the loss fell to", f"{float(fraction) * 100:g} %", "", path, True)
    column("", "loss", "training, end", ("train_loss",), True)
    column("", "accuracy", "test, %", ("test_accuracy",), False, 100)
    for header, key in (("mean", "mean"), ("95 %", "p95"), ("most", "max")):
        column("staleness (updates)", header, "", ("staleness", key), None)
    column("", "waiting", "% of time", ("waiting_share",), None, 100)
    column("", "dropped", "gradients", ("dropped_updates",), None)

    over, heads, at = [], [], 0
    while at < len(columns):
        group = columns[at][0]
        size = sum(1 for one in columns[at:] if one[0] == group) if group else 1
        for _, header, unit, _, _ in columns[at : at + size]:
            cell = f"{escape(header)}{f'<small>{escape(unit)}</small>' if unit else ''}"
            heads.append(f"<th>{cell}</th>" if group else "")
            if not group:
                over.append(f'<th rowspan="2" class="alone">{cell}</th>')
        if group:
            over.append(f'<th colspan="{size}"><span>{escape(group)}</span></th>')
        at += size
    marked = [_best(values, lower, results) for *_, values, lower in columns]
    rows = []
    best, colours = ' class="best"', method_colours(results)
    for row, (label, result) in enumerate(zip(run_labels(results), results, strict=True)):
        cells = [
            f"<td{best if marked[index] == row else ''}>{_cell(header, values[row])}</td>"
            for index, (_, header, _, values, _) in enumerate(columns)
        ]
        rows.append(
            f'<tr><th class="name" scope="row">{swatch(colours[row])}{breakable(label)}</th>'
            f"{_outcome(result)}{''.join(cells)}</tr>"
        )
    note = (
        "Bold: more than 5 % better than the next, among runs that ended well. "
        if any(m is not None for m in marked)
        else ""
    )
    averaged = "".join(f" {escape(one)}" for one in evaluated_notes(results))
    return (
        '<h2>Figures of each run</h2>\n<div class="wide" tabindex="0"><table class="figures-table"><thead>'
        f'<tr class="over"><th rowspan="2" class="name">method</th><th rowspan="2" class="name">outcome</th>'
        f"{''.join(over)}</tr>"
        f"<tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>\n"
        f"<figcaption>{note}A dash: not reached or not measured. Training loss: mean of the last 100 batches applied; "
        f"times until it was reached count from the start of training.{averaged}</figcaption>"
    )


def _best(values: list[float | None], lower: bool | None, results: Sequence[dict[str, Any]]) -> int | None:
    if lower is None:
        return None
    eligible = [None if failed(result) else value for value, result in zip(values, results, strict=True)]
    return clearly_best(eligible, lower=lower)


def _cell(header: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    if header in ("waiting", "accuracy"):
        return f"{value:.1f}"
    return f"{value}" if header == "seed" else number_text(value)


def _outcome(result: dict[str, Any]) -> str:
    # A converged run's reason says that it reached its target, as the next columns do.
    reason = "" if result.get("outcome") == "converged" else str(result.get("outcome_reason") or "")
    lost = result.get("workers_lost") or []
    if lost:
        reason += f"{'; ' if reason else ''}lost: worker {', '.join(map(str, lost))}"
    return (
        f'<td class="outcome{" bad" if failed(result) else ""}"><b>{escape(result.get("outcome", "unknown"))}</b>'
        f"{f'<small>{escape(reason)}</small>' if reason else ''}</td>"
    )


def _provenance(runs: Sequence[RunData], command: str | None) -> str:
    results = [run.result for run in runs]
    own = list(dict.fromkeys(str(result["command"]) for result in results if result.get("command")))
    commands = [command] if command else own
    parts = ["<h2>How to repeat it</h2>"]
    parts += ["<pre>" + escape("\n".join(commands)) + "</pre>"] if commands else []
    settings: list[dict[str, str]] = []
    for run in runs:
        rows = {key: _value(value) for key, value in run.config.items()}
        for key in ("backend", "seed"):
            if key not in rows and key in run.result:
                rows[key] = _value(run.result[key])
        for group in ("versions", "machine"):
            found = run.result.get(group)
            items = found.items() if isinstance(found, dict) else [("", found)] if found else []
            rows |= {
                f"{group[:-1] if group == 'versions' else group} {key}".strip(): _value(item) for key, item in items
            }
        settings.append(rows)
    names = list(dict.fromkeys(name for rows in settings for name in rows))
    body = []
    for name in names:
        values = [rows.get(name, ABSENT) for rows in settings]
        cells = (
            f'<td colspan="{len(values)}">{escape(values[0])}</td>'
            if len(set(values)) == 1
            else "".join(f"<td>{escape(value)}</td>" for value in values)
        )
        body.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    heads = "".join(f'<th class="name">{escape(label)}</th>' for label in run_labels(results))
    parts.append(
        '<h2>Settings, versions and machine</h2>\n<div class="wide" tabindex="0"><table class="settings"><thead><tr>'
        f'<th class="name"></th>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )
    return "\n".join(parts)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
