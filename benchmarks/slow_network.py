"""Four workers on links of 20, 100 and 1,000 Mbit/s: time to an accuracy, a step's time, and bytes on the wire.

    python benchmarks/slow_network.py --python torchft=/path/to/bin/python [--limit SECONDS] [--only PART,PART]

Four network namespaces around a bridge, every link shaped in both directions by `tc ... tbf`; needs root, iproute2 and the
CIFAR-10 images in the folder that PACELINE_DATA names. Bytes are read from the interfaces' counters.

Parts, which follow the protocol (`protocol.py`): `tune` searches every method's learning rate on unshaped links, with the
same updates and number of rates for all: what a lockstep method reaches after so many updates does not depend on the
network. `steps` times a step of every method on every link. `full` trains to the target on 100 Mbit/s, five times each, the
methods of the headline and both controls. Every finished run is a line of benchmarks/results/slow_network.jsonl; the same
command goes on where it was, on a file without runs of another protocol. `pages.py` makes the page of it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import protocol
from links.course import Settings
from links.methods import METHODS
from links.page import FULL_MBIT, TARGET, UPDATES, markdown, of, rates_of
from links.runs import interpreter, run

RESULTS = Path(__file__).with_name("results")
RATES = (0.025, 0.05, 0.1)  # where each search begins
LINKS_MBIT = (20.0, 100.0, 1000.0)
FULL_SEEDS = range(100, 100 + protocol.RUNS)  # others than the search's


@dataclass(frozen=True)
class Wanted:
    """A run to make."""

    part: str
    method: str
    seed: int
    rate_mbit: float | None
    learning_rate: float
    updates: int


def main() -> None:
    """Makes the runs that are missing, and the page."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # namespaces and workers go, too
    records = protocol.read(arguments.runs)
    stamp = protocol.stamp(arguments.pythons)
    started_s = time.monotonic()
    for wanted in plan(arguments.only, arguments.methods, records):
        if time.monotonic() - started_s > arguments.limit:
            print("Some runs are left: the same command goes on.")
            break
        record = {"part": wanted.part, "method": wanted.method, "target": TARGET, "quiet": arguments.quiet, **stamp}
        python = interpreter(METHODS[wanted.method].system, arguments.pythons)
        record |= run(settings_of(wanted), python, wanted.rate_mbit)
        records.append(record)
        protocol.append(arguments.runs, record)
        print(said(record), flush=True)
    (arguments.runs.with_suffix(".md")).write_text(markdown(records))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PYTHON", help="a peer's environment")
    parser.add_argument("--only", default="tune,steps,full", help="parts, separated by commas")
    parser.add_argument("--methods", help="names of methods, separated by semicolons")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no run later")
    parser.add_argument("--quiet", action="store_true", help="note that nothing else ran on the machine")
    parser.add_argument("--runs", type=Path, default=RESULTS / "slow_network.jsonl", metavar="FILE")
    arguments = parser.parse_args()
    if any("=" not in one for one in arguments.python):
        parser.error("--python names a system and its interpreter: --python torchft=/path/to/bin/python")
    arguments.pythons = dict(one.split("=", 1) for one in arguments.python)
    arguments.only = arguments.only.split(",")
    known = {name: one for name, one in METHODS.items() if one.system in ("Paceline", "PyTorch", *arguments.pythons)}
    arguments.methods = arguments.methods.split(";") if arguments.methods else list(known)
    for name in arguments.methods:
        if name not in METHODS:
            parser.error(f"there is no '{name}'; known: {'; '.join(METHODS)}.")
    for part in arguments.only:
        if part not in ("tune", "steps", "full"):
            parser.error(f"there is no part '{part}'; known: tune, steps, full.")
    if protocol.other_protocol(protocol.read(arguments.runs)):
        parser.error(protocol.refusal(arguments.runs))
    return arguments


def plan(parts: Sequence[str], methods: Sequence[str], records: list[dict[str, Any]]) -> Iterator[Wanted]:
    """All runs that are missing, everybody in turn; later ones follow from the records, which grow meanwhile."""
    if "tune" in parts:
        for method, rate, seed in protocol.trials(methods, partial(rates_of, records), RATES):
            yield Wanted("tune", method, seed, None, rate, UPDATES)
    if "steps" in parts:
        for rate_mbit in reversed(LINKS_MBIT):  # the longest runs last
            for method in methods:
                updates = METHODS[method].warm_up + METHODS[method].timed
                if not of(records, part="steps", method=method, rate_mbit=rate_mbit):
                    yield Wanted("steps", method, 0, rate_mbit, RATES[0], updates)
    for seed in FULL_SEEDS if "full" in parts else ():
        for method in methods:
            rate = rates_of(records, method).used
            if METHODS[method].full and rate is not None and not of(records, part="full", method=method, seed=seed):
                yield Wanted("full", method, seed, FULL_MBIT, rate, UPDATES)


def settings_of(wanted: Wanted) -> Settings:
    """A run's settings."""
    method = METHODS[wanted.method]
    return Settings(
        program=method.program,
        spec=method.spec,
        learning_rate=wanted.learning_rate,
        updates=wanted.updates,
        seed=wanted.seed,
        workers=method.workers,
        warm_up=method.warm_up,
    )


def said(record: dict[str, Any]) -> str:
    """One line about a run."""
    link = "unshaped" if record["rate_mbit"] is None else f"{record['rate_mbit']:g} Mbit/s"
    start = f"{record['part']}, {record['method']}, {link}, rate {record['learning_rate']:g}:"
    if "failed" in record:
        return f"{start} failed: {record['failed']}"
    return (
        f"{start} {1e3 * record['step_s']:.0f} ms and {record['step_bytes'] / 1e6:.2f} MB a step,"
        f" {100 * max((accuracy for _, _, accuracy in record['curve']), default=0.0):.1f} %"
    )


if __name__ == "__main__":
    main()
