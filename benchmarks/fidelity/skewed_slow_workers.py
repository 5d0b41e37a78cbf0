"""Each worker has its own classes, and half of the workers are 10 times slower: for whose data is the model? Simulated.

    python benchmarks/fidelity/skewed_slow_workers.py    # makes the runs that are missing, and the page

Claimed, as theory: asynchronous SGD then trains for the fast workers' data; a table of the workers' means (Ringleader ASGD,
arXiv:2509.22860), or steps as much longer as a worker is slower (Rescaled ASGD, arXiv:2605.13434), train for all. Real
gradients, the same simulated time for every method, each at its best rate by the protocol (`benchmarks/protocol.py`). Time is
simulated, so a busy machine changes no figure. Some twenty minutes on one core; the same command goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.simulator import Cluster
from paceline.tasks.base import keep_data

sys.path.append(str(Path(__file__).parents[1]))
import protocol

RUNS = Path(__file__).with_suffix(".jsonl")
TASK = f"{Path(__file__).parent / 'overlapping_classes.py'}:overlapping_classes"
WORKERS, FACTOR, LIMIT_S = 4, 10.0, 15.0
START = (0.25, 0.5, 1.0, 2.0)
FIRST_SEED = 100  # of the runs that count, others than the search's
LOCKSTEP, ASYNC = "lockstep", "parameter-server(mode=async)"
RULES = ("parameter-server(mode=ringleader)", "parameter-server(mode=async(rate=rescaled))")
SILENT, ALONE = "local-sgd(period=1000000)", "sequential"
METHODS = (LOCKSTEP, ASYNC, *RULES, SILENT, ALONE)
NAMES = {SILENT: "no communication, models averaged at the end (control)", ALONE: "one fast worker alone (control)"}
POINT = 0.01

Record = dict[str, Any]


def accuracy(spec: str, rate: float, seed: int) -> float:
    """At the end of the time; one worker alone is a fast one, and has the data of all."""
    workers = 1 if spec == ALONE else WORKERS
    config = pl.TrainConfig(
        task=TASK,
        algorithm=spec,
        partition="fixed" if spec == ALONE else "skewed(alpha=0.1)",
        epochs=1e6,
        limit_s=LIMIT_S,
        learning_rate=rate,
        seed=seed,
    )
    slow = range(WORKERS // 2 if workers > 1 else 0)
    cluster = Cluster(workers=workers, compute_s=0.01, slowness=tuple((one, FACTOR) for one in slow))
    return pl.simulate_task(config, cluster=cluster).result["test_accuracy"]


def rates_of(records: Sequence[Record], spec: str) -> protocol.Rates:
    """Errors of the search's runs."""
    tried: dict[float, dict[int, float]] = {}
    for one in records:
        if one["part"] == "tune" and one["algorithm"] == spec:
            tried.setdefault(one["rate"], {})[one["seed"]] = 1 - one["accuracy"]
    return protocol.RatesAtEqualTime(tried)


def plan(records: Sequence[Record]) -> Iterator[tuple[str, str, float, int]]:
    """Part, method, rate and seed of each run that is missing; the records grow meanwhile."""
    for spec in METHODS:
        while trial := rates_of(records, spec).next_trial(START):
            yield ("tune", spec, *trial)
    for seed in range(FIRST_SEED, FIRST_SEED + protocol.RUNS):
        for spec in METHODS:
            rate = rates_of(records, spec).used
            made = [one for one in records if (one["part"], one["algorithm"], one["seed"]) == ("full", spec, seed)]
            if rate is not None and not made:
                yield "full", spec, rate, seed


def errors(records: Sequence[Record], spec: str) -> list[float]:
    """Of the runs that count, by seed."""
    runs = [one for one in records if (one["part"], one["algorithm"]) == ("full", spec)]
    return [1 - one["accuracy"] for one in sorted(runs, key=lambda one: one["seed"])]


def markdown(records: Sequence[Record]) -> str:
    """The page."""
    rates = sorted({one["rate"] for one in records})
    lines = [
        "# Workers with data of their own, half of them slow: whom the model is for",
        "",
        summary(records),
        "",
        f"Test accuracy in % after {LIMIT_S:g} s of simulated time (`overlapping_classes.py`: a linear model, 100 classes that"
        f" overlap; {WORKERS} workers, `skewed(alpha=0.1)`, half of them {FACTOR:g} times slower; a fast one's gradient of 128"
        f" samples takes 10 ms): the median of {protocol.RUNS} seeds, and the lowest and the highest. By the"
        " [protocol](../../docs/benchmark_protocol.md), each method has the rate with the best median of the search's seeds;"
        " the accuracies are of other seeds at that rate. The last columns are points ahead of another row, seed by seed.",
        "",
        "| method | rate | accuracy | ahead of plain `async` | ahead of `lockstep` |",
        "|---|---|---|---|---|",
    ]
    for spec in METHODS:
        values = [1 - one for one in errors(records, spec)]
        cells = [
            ", ".join(f"{100 * one:+.1f}" for one in ahead(records, spec, other)) if spec != other else "-"
            for other in (ASYNC, LOCKSTEP)
        ]
        rate = f"{rates_of(records, spec).used:g}"
        lines.append(f"| {named(spec)} | {rate} | {protocol.said(values, 1, 100)} | {' | '.join(cells)} |")
    lines += [
        "",
        "A run of `lockstep` that ends with an epoch is low: in the last rounds of an epoch only the workers with the largest"
        " parts have batches left, and the model is theirs. With limits of other lengths, which are not in the file, the same"
        " runs are as accurate as those of other seeds.",
        "",
        "## Learning rates",
        "",
        "Median accuracy of the search's seeds, in %; the best is in bold.",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in rates)} |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for spec in METHODS:
        found = rates_of(records, spec)
        lines.append(f"| {named(spec)} | {' | '.join(_cell(found, rate) for rate in rates)} |")
    lines += [
        "",
        "What decides is that the model cannot fit all parts. With `digits-mlp`, which can, `async` shows no bias at equal"
        " time; with few classes and many workers parts are unequally large, and then the methods differ by what they weigh:"
        " lockstep every sample alike, `ringleader` and `rescaled` every worker. A slow worker's steps are several times as"
        " long under `rescaled`, which therefore wants the smallest rate.",
        "",
        "Made by `python benchmarks/fidelity/skewed_slow_workers.py`, which takes some twenty minutes on one core and can be"
        " interrupted. The rate 0.5 was added to the first rates while the search ran, for all methods. `python"
        " benchmarks/pages.py skewed_slow_workers` makes this page from the runs in"
        " `skewed_slow_workers.jsonl`.",
        "",
    ]
    return "\n".join(lines)


def ahead(records: Sequence[Record], spec: str, other: str) -> list[float]:
    """By how much a method is more accurate than another, seed by seed."""
    return [theirs - own for own, theirs in zip(errors(records, spec), errors(records, other), strict=True)]


def summary(records: Sequence[Record]) -> str:
    """What holds, beside the controls."""

    def reaches(spec: str) -> str:
        return f"{named(spec)} {protocol.said([1 - one for one in errors(records, spec)], 1, 100)}"

    def against(spec: str, other: str) -> str:
        low, high, _ = protocol.interval(ahead(records, spec, other))
        return "ahead of" if low > 0 else "behind" if high < 0 else "not told apart from"

    claim = all(min(ahead(records, spec, ASYNC)) > POINT for spec in RULES)
    below = all(against(ALONE, spec) == "ahead of" for spec in (LOCKSTEP, ASYNC, *RULES))
    fails = [one < -POINT for one in ahead(records, ASYNC, LOCKSTEP)]
    near = [one >= -POINT for spec in RULES for one in ahead(records, spec, LOCKSTEP)]
    text = (
        "Set before these runs: plain `async`, the control, ends more than a point behind lockstep in every seed:"
        f" {_verdict(fails)}. `ringleader` and `rescaled` end within a point of lockstep in every seed, or ahead:"
        f" {_verdict(near)}. Compared only after the runs were seen: `ringleader` and `rescaled`"
        f" {'are' if claim else 'ARE NOT'} more than a point ahead of plain `async` in every seed."
        f" {'; '.join(f'{named(spec)} is {against(spec, LOCKSTEP)} lockstep' for spec in RULES)}. Accuracies in %, each"
        f" at its best rate: {'; '.join(map(reaches, METHODS))}."
    )
    if below:
        text += (
            " One fast worker with the data of all is ahead of every method in every seed, so sharing the work does not pay"
            " here."
        )
    edge = [named(spec) for spec in METHODS if rates_of(records, spec).at_edge]
    return text + (f" The best rate is at the grid's edge of {', '.join(edge)}." if edge else "")


def _verdict(seeds: Sequence[bool]) -> str:
    return f"{'holds' if all(seeds) else 'FAILS'}, {sum(seeds)} of {len(seeds)}"


def named(spec: str) -> str:
    """In tables."""
    return NAMES.get(spec, f"`{spec}`")


def _cell(found: protocol.Rates, rate: float) -> str:
    if rate not in found.medians:
        return "-"
    text = f"{100 * (1 - found.medians[rate]):.1f}"
    return f"**{text}**" if rate == found.best else text


def main() -> None:
    """Makes what is missing."""
    records = protocol.read(RUNS)
    if protocol.other_protocol(records):
        sys.exit(f"skewed_slow_workers.py: error: {protocol.refusal(RUNS)}")
    with keep_data():
        for part, spec, rate, seed in plan(records):
            found = {
                "part": part,
                "algorithm": spec,
                "rate": rate,
                "seed": seed,
                "accuracy": accuracy(spec, rate, seed),
            }
            records.append({**found, "protocol": protocol.VERSION})
            protocol.append(RUNS, records[-1])
            print(found, flush=True)
    RUNS.with_suffix(".md").write_text(markdown(records), encoding="utf-8")


if __name__ == "__main__":
    main()
