"""`benchmarks/results/slow_network.md`, from the runs that have been made."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from links.course import SNAPSHOT_EVERY
from links.methods import METHODS, SILENT
from paceline.system.machine import machine, versions

Record = dict[str, Any]
TUNED, TUNED_LONGER = 240, 480  # updates; the second where no rate came to the target within the first


def of(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records with these values."""
    return [one for one in records if all(one.get(key) == value for key, value in wanted.items())]


def reached(record: Record) -> tuple[int, float] | None:
    """The update and the seconds after which a run was at its target first; None: never."""
    for step, at_s, accuracy in record.get("curve", ()):
        if accuracy >= record["target"]:
            return step, at_s
    return None


def best_rate(records: Sequence[Record], method: str) -> float | None:
    """The learning rate with which an unshaped run was at the target after the fewest updates; None: no rate was."""
    tried = [(found[0], one["learning_rate"]) for one in _tuning(records, method) if (found := reached(one))]
    return min(tried)[1] if tried else None


def updates_needed(records: Sequence[Record], method: str) -> int | None:
    """With that rate."""
    needed = [found[0] for one in _tuning(records, method) if (found := reached(one))]
    return min(needed, default=None)


def markdown(records: Sequence[Record], target: float) -> str:
    """The whole page."""
    about, used = machine(), versions()
    if not records:
        return ""
    first = records[0]
    timed = [one for one in records if one["part"] != "tune"]
    quiet = sum(bool(one["quiet"]) for one in timed)
    how = (
        "A network of 2,730,314 parameters (three convolutions, one wide linear layer) on CIFAR-10's images,"
        f" {first['workers']} processes with a batch of {first['batch_size']} each, SGD with momentum 0.9, to a test"
        f" accuracy of {100 * target:g} %. Each process has a network of its own, as if on a machine of its own, whose link"
        " is shaped in both directions; bytes are what the links carried, headers and answers with them. The parameters of"
        f" all workers are written down every {SNAPSHOT_EVERY} steps and their mean evaluated afterwards; the clock starts"
        " when all workers have met. Time and bytes of a step are those of ten steps after four, or of two whole periods"
        " after two."
    )
    made = (
        f"{about['processor']}, {about['cores']} cores; Python {used['python']}, torch {used['torch']}. {quiet} of the"
        f" {len(timed)} runs whose time counts were made while nothing else ran on the machine. Made by"
        " `python benchmarks/slow_network.py --python torchft=...`; the runs are in [slow_network.jsonl](slow_network.jsonl)."
    )
    text = ["# Slow links: ours and others'", ""]
    for paragraph in (summary(records, target), how, made):
        if paragraph:
            text += [textwrap.fill(paragraph, 125, break_on_hyphens=False, break_long_words=False), ""]
    text += ["## Trained to the target on 100 Mbit/s", "", *full_table(records), ""]
    text += [
        "## A step's time, times the updates that the target took",
        "",
        *steps_table(records),
        "",
        *silent(records),
    ]
    text += ["## Averages beside steps", "", *hidden_lines(records), ""]
    text += ["## Learning rates", "", *rates_table(records), ""]
    return "\n".join(text)


def summary(records: Sequence[Record], target: float) -> str:
    """The best of ours beside plain DDP and the best of the others."""
    times = _full_times(records)
    plain = times.get("DistributedDataParallel")
    ours = {name: value for name, value in times.items() if METHODS[name].system == "Paceline"}
    others = {name: value for name, value in times.items() if METHODS[name].system != "Paceline"}
    if plain is None or not ours or not others or math.isinf(plain) or math.isinf(min(ours.values())):
        return ""
    own, other = min(ours, key=lambda name: ours[name]), min(others, key=lambda name: others[name])
    return (
        f"On 100 Mbit/s, plain DistributedDataParallel took {plain:.0f} s to {100 * target:g} %, the fastest of the others,"
        f" {other}, {others[other]:.0f} s, and the fastest of ours, {own}, {ours[own]:.0f} s: {plain / ours[own]:.1f} and"
        f" {others[other] / ours[own]:.2f} times sooner. All of ours are in the table."
    )


def full_table(records: Sequence[Record]) -> list[str]:
    """Medians of the runs to the target; the fastest first."""
    rows = _head("method", "of", "seconds to the target", "updates to it", "MB sent per worker", "runs")
    times = _full_times(records)
    for name in sorted(times, key=lambda one: times[one]):
        runs = of(records, part="full", method=name)
        came = [found for one in runs if (found := reached(one))]
        seconds = f"{len(came)} of {len(runs)} runs: " if 0 < len(came) < len(runs) else ""
        seconds += _spread([at_s for _, at_s in came], 1) if came else "never"
        sent = _spread([one["sent_bytes"] / 1e6 for one in runs], 0)
        updates = _spread([float(step) for step, _ in came], 0) if came else "-"
        rows.append(_row(name, METHODS[name].system, seconds, updates, sent, len(runs)))
    return rows


def steps_table(records: Sequence[Record]) -> list[str]:
    """What a step takes on each link; and, times the updates needed on unshaped links, what the target would take."""
    links = sorted({one["rate_mbit"] for one in of(records, part="steps")})
    rows = _head(
        "method", "updates", "MB per step", *(f"{link:g} Mbit/s: ms per step, s to the target" for link in links)
    )
    for name in METHODS:
        needed = updates_needed(records, name)
        cells, sent = [], "-"
        for link in links:
            runs = [one for one in of(records, part="steps", method=name, rate_mbit=link) if "failed" not in one]
            if not runs:
                cells.append("-")
                continue
            step_s = median(one["step_s"] for one in runs)
            sent = f"{median(one['step_bytes'] for one in runs) / 1e6:.2f}"
            cells.append(f"{1e3 * step_s:,.0f}, {'-' if needed is None else f'{step_s * needed:,.0f}'}")
        if any(cell != "-" for cell in cells):
            rows.append(_row(name, "-" if needed is None else needed, sent, *cells))
    return rows


def silent(records: Sequence[Record]) -> list[str]:
    """What the mean of models comes to that have never heard of each other: what messages must be worth more than."""
    needed = updates_needed(records, SILENT)
    if needed is None:
        return []
    said = (
        f'"{SILENT}" is the mean of models each of which has trained by itself from the same start. It comes to the target,'
        f" too, after {needed} updates: this task is so easy that a method whose row has more seconds is not worth its"
        f" messages here. Further up they are: in {TUNED_LONGER} updates it came to {_highest(records, SILENT):.1%} at most,"
        f" local-sgd to {_highest(records, 'local-sgd'):.1%}."
    )
    return [textwrap.fill(said, 125, break_on_hyphens=False, break_long_words=False), ""]


def _highest(records: Sequence[Record], method: str) -> float:
    """Accuracy within the longest tuning."""
    runs = of(_tuning(records, method), updates=TUNED_LONGER)
    return max((accuracy for one in runs for _, _, accuracy in one.get("curve", ())), default=math.nan)


def hidden_lines(records: Sequence[Record]) -> list[str]:
    """A step of the methods that average beside steps, over one without communication."""
    lines = []
    for name, method in METHODS.items():
        for link in sorted({one["rate_mbit"] for one in of(records, part="steps")}) if method.hidden else ():
            own, silent = (
                [one["step_s"] for one in of(records, part="steps", method=who, rate_mbit=link) if "failed" not in one]
                for who in (name, SILENT)
            )
            if own and silent:
                ratio = median(own) / median(silent)
                lines.append(f"- {name}, {link:g} Mbit/s: a step takes {ratio:.2f} times one without communication.")
    return lines or ["Not measured yet."]


def rates_table(records: Sequence[Record]) -> list[str]:
    """After how many updates each rate reached the target on unshaped links."""
    tuning = of(records, part="tune")
    rates = sorted({one["learning_rate"] for one in tuning})
    rows = [
        "Updates to the target on links that nothing slows, one run of each; the rate with the smallest number is taken. Where"
        " no rate came to it, longer runs were made. Outer optimizers have their usual rate, which was not tuned.",
        "",
        *_head("method", *(f"{rate:g}" for rate in rates)),
    ]
    for name in METHODS:
        longest = {one["learning_rate"]: one for one in sorted(_tuning(records, name), key=lambda one: one["updates"])}
        if longest:
            cells = [_came(longest[rate]) if rate in longest else "-" for rate in rates]
            rows.append(_row(name, *cells))
    return rows


def _came(record: Record) -> str:
    found = reached(record)
    return str(found[0]) if found else f"not in {record['updates']}"


def _tuning(records: Sequence[Record], method: str) -> list[Record]:
    return of(records, part="tune", method=method)


def _full_times(records: Sequence[Record]) -> dict[str, float]:
    times = {}
    for name in METHODS:
        runs = of(records, part="full", method=name)
        if runs:
            times[name] = median(found[1] if (found := reached(one)) else math.inf for one in runs)
    return times


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
