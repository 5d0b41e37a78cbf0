"""Four workers on links of 20, 100 and 1,000 Mbit/s: time to an accuracy, a step's time, and bytes on the wire.

    python benchmarks/slow_network.py --python torchft=/path/to/bin/python [--limit SECONDS] [--only PART,PART]

Four network namespaces around a bridge, every link shaped in both directions by `tc ... tbf`; needs root, iproute2 and the
CIFAR-10 images in the folder that PACELINE_DATA names. Bytes are read from the interfaces' counters.

Parts: `tune` searches every method's learning rate, of the same few, on unshaped links: what a lockstep method reaches after
so many updates does not depend on the network. A method that no rate brings to the target is tried for twice as many
updates. `steps` times a step of every method on every link. `full` trains to the target on 100 Mbit/s, three times each, with
those methods that the headline is about. Every finished run is a line of benchmarks/results/slow_network.jsonl; the same
command goes on where it was. The page is benchmarks/results/slow_network.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from links.course import SNAPSHOT_EVERY, Settings
from links.methods import METHODS
from links.page import TUNED, TUNED_LONGER, best_rate, markdown, of, updates_needed
from links.runs import interpreter, run

RESULTS = Path(__file__).with_name("results")
RATES = (0.02, 0.05, 0.1)
TARGET = 0.45
LINKS_MBIT = (20.0, 100.0, 1000.0)
FULL_MBIT, REPETITIONS = 100.0, 3
MARGIN = 1.25  # of the updates that a full run makes, beyond those that the same method needed on unshaped links


@dataclass(frozen=True)
class Wanted:
    """A run to make."""

    part: str
    method: str
    seed: int
    rate_mbit: float | None
    learning_rate: float | None = None
    updates: int | None = None


def main() -> None:
    """Makes the runs that are missing, and the page."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # namespaces and workers go, too
    records = read(arguments.runs)
    started_s = time.monotonic()
    for wanted in plan(arguments, records):
        if made(records, wanted):
            continue
        if time.monotonic() - started_s > arguments.limit:
            print("Some runs are left: the same command goes on.")
            break
        settings = settings_of(wanted, records)
        if settings is None:
            print(f"{wanted.method}: no rate reached {TARGET:.0%} on unshaped links; not trained on slow ones.")
            continue
        record = {"part": wanted.part, "method": wanted.method, "target": TARGET, "quiet": arguments.quiet}
        record |= run(settings, interpreter(METHODS[wanted.method].system, arguments.pythons), wanted.rate_mbit)
        records.append(record)
        with arguments.runs.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(said(record), flush=True)
    (arguments.runs.with_suffix(".md")).write_text(markdown(records, TARGET))


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
    return arguments


def read(path: Path) -> list[dict[str, Any]]:
    """Runs that were finished earlier; a last line that was cut off does not count."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def plan(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> Iterator[Wanted]:
    """All runs, everybody in turn; how long a method is tuned follows from the records, which grow meanwhile."""
    if "tune" in arguments.only:
        for updates in (TUNED, TUNED_LONGER):
            tried = [one for one in arguments.methods if updates == TUNED or best_rate(records, one) is None]
            for learning_rate in RATES:
                for method in tried:
                    yield Wanted("tune", method, 0, None, learning_rate, updates)
    if "steps" in arguments.only:
        for rate_mbit in reversed(LINKS_MBIT):  # the longest runs last
            for method in arguments.methods:
                updates = METHODS[method].warm_up + METHODS[method].timed
                yield Wanted("steps", method, 0, rate_mbit, RATES[0], updates)
    if "full" in arguments.only:
        for seed in range(1, REPETITIONS + 1):
            for method in arguments.methods:
                if METHODS[method].full:
                    yield Wanted("full", method, seed, FULL_MBIT)


def made(records: list[dict[str, Any]], wanted: Wanted) -> bool:
    """Whether a run is there already."""
    same = of(records, part=wanted.part, method=wanted.method, seed=wanted.seed, rate_mbit=wanted.rate_mbit)
    if wanted.updates is not None:
        same = of(same, learning_rate=wanted.learning_rate, updates=wanted.updates)
    return bool(same)


def settings_of(wanted: Wanted, records: list[dict[str, Any]]) -> Settings | None:
    """A run's settings; None where the method has never reached the target."""
    method = METHODS[wanted.method]
    learning_rate, updates = wanted.learning_rate, wanted.updates
    if updates is None:
        learning_rate = best_rate(records, wanted.method)
        needed = updates_needed(records, wanted.method)
        if learning_rate is None or needed is None:
            return None
        updates = -(-int(needed * MARGIN) // SNAPSHOT_EVERY) * SNAPSHOT_EVERY
    assert learning_rate is not None
    return Settings(
        program=method.program,
        spec=method.spec,
        learning_rate=learning_rate,
        updates=updates,
        seed=wanted.seed,
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
