"""`benchmarks/results/slow_network.md`, from the runs that have been made."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import protocol
from protocol import Rates

from links.course import SNAPSHOT_EVERY
from links.methods import ALONE, FRAGMENTS, METHODS, SILENT

Record = dict[str, Any]
TARGET = 0.45
UPDATES = 480  # of every run but those that only time a step
FULL_MBIT = 100.0
PLAIN = "DistributedDataParallel"
EARLIER = "Intel(R) Xeon(R) Processor, 2 cores; Python 3.11.7, torch 2.13.0+cpu"  # before records named their machine


def of(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records with these values."""
    return [one for one in records if all(one.get(key) == value for key, value in wanted.items())]


def reached(record: Record) -> tuple[int, float] | None:
    """The update and the seconds after which a run was at its target first; None: never."""
    for step, at_s, accuracy in record.get("curve", ()):
        if accuracy >= record["target"]:
            return step, at_s
    return None


def rates_of(records: Sequence[Record], method: str, runs: int = protocol.RUNS) -> Rates:
    """Updates to the target of a method's unshaped runs; a shorter run that was not there yet says nothing."""
    tried: dict[float, dict[int, float]] = {}
    for one in of(records, part="tune", method=method):
        found = reached(one)
        if found or one["updates"] >= UPDATES:
            tried.setdefault(one["learning_rate"], {})[one["seed"]] = found[0] if found else math.inf
    return Rates(tried, runs)


def updates_needed(records: Sequence[Record], method: str) -> float | None:
    """Median updates to the target on unshaped links, at the rate that is used; None: no rate reached it."""
    rates = rates_of(records, method, _runs_per_rate(records))
    rate = rates.best if protocol.other_protocol(records) else rates.used  # earlier runs had the best one
    return rates.medians.get(rate) if rate is not None else None


def _runs_per_rate(records: Sequence[Record]) -> int:
    return min(protocol.RUNS, len({one["seed"] for one in of(records, part="tune")})) or protocol.RUNS


def markdown(records: Sequence[Record]) -> str:
    """The whole page."""
    if not records:
        return ""
    first = records[0]
    timed = [one for one in records if one["part"] != "tune"]
    quiet = sum(bool(one["quiet"]) for one in timed)
    how = (
        "A network of 2,730,314 parameters (three convolutions, one wide linear layer) on CIFAR-10's images,"
        f" {first['workers']} processes with a batch of {first['batch_size']} each, SGD with momentum 0.9, to a test"
        f" accuracy of {100 * first['target']:g} %. Each process has a network of its own, as if on a machine of its own,"
        " whose link is shaped in both directions; bytes are what the links carried, headers and answers with them. The"
        f" parameters of all workers are written down every {SNAPSHOT_EVERY} steps and their mean evaluated"
        " afterwards; the clock starts when all workers have met. Time and bytes of a step are those of ten steps after four,"
        " or of two whole periods after two."
    )
    hours = sum(one["took_s"] for one in records) / 3600
    made = (
        f"{protocol.made_on(records, EARLIER)}. {quiet} of the {len(timed)} runs whose time counts were made while nothing"
        f" else ran on the machine. In brackets are the lowest and the highest run. All runs took {hours:.1f} hours. Made by"
        " `python benchmarks/slow_network.py --python torchft=...`, which can be interrupted; `python benchmarks/pages.py"
        " slow_network` makes this page from the runs in [slow_network.jsonl](slow_network.jsonl)."
    )
    text = ["# Slow links: ours and others'", ""]
    for paragraph in (summary(records), lacks(records), how, made):
        if paragraph:
            text += [wrapped(paragraph), ""]
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


def wrapped(text: str) -> str:
    """A paragraph in lines."""
    return textwrap.fill(text, 125, break_on_hyphens=False, break_long_words=False)


def full_costs(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds to the target of every method's full runs, the soonest first; infinite where a run did not arrive."""
    costs = {
        name: [found[1] if (found := reached(one)) else math.inf for one in runs]
        for name in METHODS
        if (runs := of(records, part="full", method=name))
    }
    return dict(sorted(costs.items(), key=lambda one: median(one[1])))


def control_costs(records: Sequence[Record]) -> tuple[list[float], str]:
    """Seconds to the target without communication, and how they are known: by full runs, or else by a step's time."""
    found = full_costs(records).get(SILENT)
    if found:
        return found, f"{len(found)} runs"
    steps = of(records, part="steps", method=SILENT, rate_mbit=FULL_MBIT)
    needed = updates_needed(records, SILENT)
    if not steps or needed is None:
        return [], ""
    step_s = median(one["step_s"] for one in steps)
    how = f"{needed:g} updates of {1e3 * step_s:.0f} ms; no run of it was trained on these links"
    return [step_s * needed], how


def summary(records: Sequence[Record]) -> str:
    """Who is sooner than no communication, beside plain DDP and the best of the others."""
    costs, (control, how) = full_costs(records), control_costs(records)
    if not control or not costs:
        return ""
    others = {name: times for name, times in costs.items() if name not in (SILENT, ALONE)}
    ahead = [name for name, times in others.items() if protocol.sooner(times, control)]
    behind = [name for name in others if name not in ahead]
    best = min(
        (one for one in others if METHODS[one].system != "Paceline"), key=lambda one: median(others[one]), default=None
    )

    def listed(names: Sequence[str]) -> str:
        return "; ".join(f"{name} {protocol.said(others[name])}" for name in names) or "no method"

    target = f"{100 * records[0]['target']:g} %"
    text = (
        f"On 100 Mbit/s, workers that never communicate reach {target} after {protocol.said(control, 0)} s ({how}). Sooner by"
        f" more than the intervals, in seconds: {listed(ahead)}. All others are not, so that communication is not shown to"
        f" help there: {listed(behind)}."
    )
    if best is not None:
        text += f" The fastest of the others' methods is {best}."
    return text + f" {_stopped(records)}" if _stopped(records) else text


def _stopped(records: Sequence[Record]) -> str:
    """Runs that were ended before they arrived, with fewer updates than a search has."""
    lines = []
    for name, times in full_costs(records).items():
        ended = [one["updates"] for one in of(records, part="full", method=name) if reached(one) is None]
        steps = of(records, part="steps", method=name, rate_mbit=FULL_MBIT)
        needed = None if METHODS[name].asynchronous else updates_needed(records, name)
        if ended and min(ended) < UPDATES:
            said = f"Of the {len(times)} runs of {name}, {len(ended)} ended at {ended[0]} updates before it was there"
            if steps and needed:
                product = median(one["step_s"] for one in steps) * needed
                said += f" (a step's time, times the {needed:g} updates of the unshaped run: {product:.0f} s)"
            lines.append(said + ".")
    return " ".join(lines)


def lacks(records: Sequence[Record]) -> str:
    """What the runs lack of what the protocol asks for; nothing where it was followed."""
    found, full, tune = [], of(records, part="full"), of(records, part="tune")
    missing = [name for name in (SILENT, ALONE) if not of(full, method=name)]
    if missing:
        found.append(f"full runs of the controls ({', '.join(missing)})")
    least = min((len(times) for times in full_costs(records).values()), default=0)
    if least < protocol.RUNS:
        found.append(f"{protocol.RUNS} runs of each row (there are {least})")
    runs = _runs_per_rate(records)
    if runs < protocol.RUNS:
        rates = sorted({one["learning_rate"] for one in tune})
        found.append(
            f"{protocol.RUNS} runs of each learning rate ({', '.join(f'{one:g}' for one in rates)} have {runs})"
        )
    edges = [name for name in METHODS if of(tune, method=name) and _best_at_edge(records, name, runs)]
    if edges:
        found.append(f"rates around the best one, which is the lowest or highest tried of {', '.join(edges)}")
    if not of(records, method=FRAGMENTS):
        found.append("torchft's DiLoCo in four fragments with a delay, as ours has (its row has one, and float32)")
    asked = "The [protocol](../../docs/benchmark_protocol.md) asks for more than these runs have"
    return f"{asked}: {'; '.join(found)}." if found else ""


def _best_at_edge(records: Sequence[Record], method: str, runs: int) -> bool:
    """Whether the rate with the fewest updates has no other on one side; rates that did not arrive count as tried."""
    tried = sorted({one["learning_rate"] for one in of(records, part="tune", method=method)})
    best = rates_of(records, method, runs).best
    return best is None or best in (tried[0], tried[-1])


def full_table(records: Sequence[Record]) -> list[str]:
    """Medians of the runs to the target, the fastest first; and what the bytes alone take on such a link."""
    rows = {}
    for name, times in full_costs(records).items():
        runs = of(records, part="full", method=name)
        steps = [float(found[0]) if (found := reached(one)) else math.inf for one in runs]
        sent = [one["sent_bytes"] / 1e6 for one in runs]
        until = [
            one["sent_bytes"] * step / one["updates"] for one, step in zip(runs, steps, strict=True) if step < math.inf
        ]
        bound = f"{protocol.transfer_s(median(until), FULL_MBIT):.1f}" if until else "-"
        cells = (protocol.said(times), bound, protocol.said(steps, 0), protocol.said(sent, 0), len(runs))
        rows[name] = (median(times), _row(name, METHODS[name].system, *cells))
    control, how = control_costs(records)
    if control and SILENT not in rows:
        rows[SILENT] = (
            median(control),
            _row(f"{SILENT} (control)", "Paceline", f"{control[0]:.1f}: {how}", 0, "-", 0, 0),
        )
    head = _head(
        "method", "of", "seconds to the target", "seconds for its bytes", "updates to it", "MB sent per worker", "runs"
    )
    return [*head, *(row for _, row in sorted(rows.values(), key=lambda one: one[0]))]


def short_table(records: Sequence[Record]) -> list[str]:
    """The same for `docs/slow_network.md`: specs and seconds alone."""
    costs = {name: (median(times), protocol.said(times)) for name, times in full_costs(records).items()}
    control, _ = control_costs(records)
    if control:
        costs.setdefault(SILENT, (median(control), f"{control[0]:.0f}"))
    rows = ["| method | seconds |", "|---|---|"]
    for name, (_, text) in sorted(costs.items(), key=lambda one: one[1][0]):
        ours = METHODS[name].system == "Paceline" and name != SILENT
        label = f"`{METHODS[name].spec}`" if ours else f"**{name}** (control)" if name == SILENT else name
        rows.append(f"| {label} | {text} |")
    return rows


def steps_table(records: Sequence[Record]) -> list[str]:
    """What a step takes on each link; and, times the updates needed on unshaped links, what the target would take."""
    links = sorted({one["rate_mbit"] for one in of(records, part="steps")})
    rows = _head(
        "method", "updates", "MB per step", *(f"{link:g} Mbit/s: ms per step, s to the target" for link in links)
    )
    for name, method in METHODS.items():
        needed = None if method.asynchronous else updates_needed(records, name)
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
            rows.append(_row(name, "-" if needed is None else f"{needed:g}", sent, *cells))
    return rows


def silent(records: Sequence[Record]) -> list[str]:
    """What the mean of models comes to that have never heard of each other: what messages must be worth more than."""
    needed = updates_needed(records, SILENT)
    if needed is None:
        return []
    said = (
        f'"{SILENT}" is the mean of models each of which has trained by itself from the same start. It comes to the target,'
        f" too, after {needed:g} updates: this task is so easy that a method whose row has more seconds is not worth its"
        f" messages here. Further up they are: in {UPDATES} updates it came to {_highest(records, SILENT):.1%} at most,"
        f" local-sgd to {_highest(records, 'local-sgd'):.1%}. How often the asynchronous ad-psgd averages depends on the"
        " links, so that its updates on unshaped ones say nothing about the seconds on slow ones."
    )
    return [wrapped(said), ""]


def _highest(records: Sequence[Record], method: str) -> float:
    """Accuracy within the longest search."""
    runs = of(records, part="tune", method=method, updates=UPDATES)
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
    """After how many updates each rate reached the target on unshaped links, and which rate the full runs have."""
    tuning = of(records, part="tune")
    rates = sorted({one["learning_rate"] for one in tuning})
    rows = [
        "Updates to the target on links that nothing slows, and the rate of the full runs. Outer optimizers have their usual"
        " rate, which was not tuned.",
        "",
        *_head("method", *(f"{rate:g}" for rate in rates), "full runs"),
    ]
    for name in METHODS:
        own = of(tuning, method=name)
        cells = [_came(of(own, learning_rate=rate)) for rate in rates]
        taken = sorted({one["learning_rate"] for one in of(records, part="full", method=name)})
        if own:
            rows.append(_row(name, *cells, ", ".join(f"{rate:g}" for rate in taken) or "-"))
    return rows


def _came(runs: Sequence[Record]) -> str:
    """The longest run of each seed counts."""
    longest = {one["seed"]: one for one in sorted(runs, key=lambda one: one["updates"])}
    costs = [float(found[0]) if (found := reached(one)) else math.inf for one in longest.values()]
    missed = bool(costs) and all(map(math.isinf, costs))
    return f"not in {max(one['updates'] for one in runs)}" if missed else protocol.said(costs, 0)


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
