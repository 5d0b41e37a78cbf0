"""Ours and others', head to head: the same model, data, optimizer and batches, in four real processes of each system.

    python benchmarks/head_to_head.py --small                  # two of ours and PyTorch's DDP, under three minutes
    python benchmarks/head_to_head.py --tune   # everybody, by the protocol (`protocol.py`): hours, so it goes on where it was

Three scenes: all workers alike; one ten times as slow; one killed (`kill -9`) halfway. Measured: seconds to a test accuracy,
from when all workers stand ready; final accuracy; goodput, which is useful samples per second against the same system's
undisturbed; and what it took to go on. Every finished run is a line of a file, and runs found there are not made again. A
run during which the machine's host gave more than a twentieth of its cores' time to others does not count, and is made again
at the end, as long as there is time.

PyTorch's own need nothing but torch. The others run in environments of their own, each named by `--python SYSTEM=PYTHON`:
`pip install --constraint constraints.txt torch numpy torchft`, and `torch numpy hivemind`. Without one, its rows are left out.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import protocol
from contest.course import Settings, save_data
from contest.methods import METHODS
from contest.picture import pictures
from contest.results import TIMES_AGAIN, markdown
from contest.runs import run
from contest.tables import DISTURBED, SCENES, Record, of, rates_of, table

from paceline.errors import UsageError
from paceline.specs.bounds import available_bytes
from paceline.tasks.load import load_task

HERE = Path(__file__).parent
ROOT = HERE.parent
RATES = (0.2, 0.4, 0.8)  # where each search begins
FIRST_SEED = 100  # of the runs that count: others than the search's
MOST_STOLEN = 0.05  # of the cores' time, by the machine's host, in a run that counts
FULL: dict[str, Any] = {"task": "mnist-mlp", "batch_size": 64, "epochs": 3, "step_s": 0.01}
DIGITS: dict[str, Any] = {"task": "digits-mlp", "batch_size": 16, "epochs": 24, "step_s": 0.01}
SMALL: dict[str, Any] = {
    "task": "digits-mlp",
    "batch_size": 16,
    "epochs": 12,
    "step_s": 0.003,
    "snapshot_every_s": 0.05,
}
TARGETS = {"mnist-mlp": 0.96, "digits-mlp": 0.93}
RATE_FACTORS = {"mnist-mlp": 1.0, "digits-mlp": 0.5}  # batches of a quarter of the size
LEAST_GIB = 2.0  # four of DDP's workers, their launcher and what watches them held 1.7 GiB
TUNED_AT_STEP_S = 0.002  # rates are compared by shares of a run, which does not depend on how long a step takes
SMALL_METHODS, SMALL_SCENES = ("ad-psgd", "all-reduce", "DistributedDataParallel"), ("none", "slow")


def main() -> None:
    """Runs what is missing, prints the tables, writes them and the pictures."""
    arguments = parse()
    available = available_bytes(by_this_process=False)
    if arguments.small and available < LEAST_GIB * 2**30:
        print(
            f"Left out: this comparison needs {LEAST_GIB:g} GiB of memory, and {available / 2**30:.1f} GiB are available."
        )
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run's processes are ended before this one
    records = protocol.read(arguments.runs)
    refuse_mixture(arguments, records)
    started_s, stamp = time.monotonic(), protocol.stamp(arguments.pythons)
    data = ROOT / "runs" / "head_to_head" / f"{arguments.common['task']}.pt"
    save_data(arguments.common["task"], data)
    for wanted in plan(arguments, records):
        if arguments.limit is not None and time.monotonic() - started_s > arguments.limit:
            print("Some runs are left: the same command goes on.")
            break
        settings = settings_of(arguments, wanted, records, data)
        record = run(settings, target=arguments.target, pythons=arguments.pythons)
        timed = wanted.scene != "tune" and not arguments.small  # a search counts samples
        disturbed = timed and record["stolen_share"] > MOST_STOLEN
        record |= {
            "scene": wanted.scene + (DISTURBED if disturbed else ""),
            "quiet": arguments.quiet,
            "day": date.today().isoformat(),
            **stamp,
        }
        records.append(record)
        protocol.append(arguments.runs, record)
        print(said(record), flush=True)
    show(arguments, records)


def parse() -> argparse.Namespace:
    """The command line, with what follows from it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenes", help=f"of {', '.join(SCENES)}; separated by commas")
    parser.add_argument("--methods", help="names of methods, separated by semicolons")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--small", action="store_true", help="three methods, small data, one slow worker; into runs/")
    parser.add_argument(
        "--tune", action="store_true", help=f"first search every method's learning rate, from {RATES}, by the protocol"
    )
    parser.add_argument("--python", action="append", default=[], metavar="SYSTEM=PYTHON", help="a peer's environment")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no run later than this")
    parser.add_argument("--quiet", action="store_true", help="note that nothing else ran on the machine")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="where finished runs are kept")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    if any("=" not in one for one in arguments.python):
        parser.error("--python names a system and its interpreter: --python torchft=/path/to/bin/python")
    if arguments.workers < 2 or (arguments.repetitions or 1) < 1 or (arguments.epochs or 1) < 1:
        parser.error("--workers must be 2 or more, --repetitions and --epochs 1 or more.")
    arguments.pythons = dict(one.split("=", 1) for one in arguments.python)
    for system, python in arguments.pythons.items():
        if shutil.which(python) is None:
            parser.error(
                f"there is no interpreter {python} for {system}: make an environment as the first lines here say."
            )
    arguments.common = SMALL if arguments.small else FULL
    if arguments.common is FULL:
        try:
            load_task("mnist-mlp").load()
        except UsageError:
            arguments.common = DIGITS
    if arguments.epochs is not None:
        arguments.common = {**arguments.common, "epochs": arguments.epochs}
    arguments.target = TARGETS[arguments.common["task"]]
    here = [name for name, one in METHODS.items() if one.system in ("Paceline", "PyTorch", *arguments.pythons)]
    methods, scenes = (SMALL_METHODS, SMALL_SCENES) if arguments.small else (here, tuple(SCENES))
    arguments.methods = chosen(parser, arguments.methods, ";", methods, METHODS)
    arguments.scenes = chosen(parser, arguments.scenes, ",", scenes, SCENES)
    arguments.repetitions = arguments.repetitions or (1 if arguments.small else protocol.RUNS)
    if arguments.runs is None:
        results = HERE / "results" / "head_to_head.jsonl"
        arguments.runs = ROOT / "runs" / "head_to_head" / "runs.jsonl" if arguments.small else results
        if arguments.small:
            arguments.runs.unlink(missing_ok=True)
    arguments.runs.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def chosen(
    parser: argparse.ArgumentParser, text: str | None, separator: str, default: Iterable[str], known: Iterable[str]
) -> list[str]:
    """The names in a list; ends the program with a sentence where one is unknown."""
    names = list(default) if text is None else [name.strip() for name in text.split(separator)]
    for name in names:
        if name not in known:
            parser.error(f"there is no '{name}'; known: {f'{separator} '.join(known)}.")
    return names


def refuse_mixture(arguments: argparse.Namespace, records: list[Record]) -> None:
    """Ends the program where finished runs are of other settings than those asked for: a table would mix both."""
    asked = {**arguments.common, "target": arguments.target}
    if protocol.other_protocol(records):
        print(f"head_to_head.py: error: {protocol.refusal(arguments.runs)}", file=sys.stderr)
        sys.exit(2)
    for one in records:
        own = {**asked, "workers": METHODS[one["method"]].workers or arguments.workers}
        other = {key for key in own if one.get(key) != own[key] and (key, one["scene"]) != ("step_s", "tune")}
        if other:
            what = ", ".join(f"{key} {one.get(key)} and not {own[key]}" for key in sorted(other))
            print(
                f"head_to_head.py: error: {arguments.runs} has runs with {what}. Name another file with --runs, or ask for"
                " those settings; MNIST is found in the folder that PACELINE_DATA names.",
                file=sys.stderr,
            )
            sys.exit(2)


@dataclass(frozen=True)
class Wanted:
    """A run to make; the rate is None where the tuned one is to be taken."""

    scene: str
    method: str
    seed: int
    rate: float | None = None


def plan(arguments: argparse.Namespace, records: list[Record]) -> Iterator[Wanted]:
    """What is missing, everybody in turn, in another order in each repetition; later runs follow from the growing records."""
    searching = arguments.methods if arguments.tune else ()
    for method, rate, seed in protocol.trials(searching, partial(rates_of, records), RATES):
        yield Wanted("tune", method, seed, rate)
    for _ in range(1 + TIMES_AGAIN):  # runs that were disturbed are missing again
        for seed in range(FIRST_SEED, FIRST_SEED + arguments.repetitions):
            for scene in arguments.scenes:
                order = [arguments.methods[i] for i in np.random.default_rng(seed).permutation(len(arguments.methods))]
                for name in order:
                    if scene in METHODS[name].scenes and not of(records, scene=scene, method=name, seed=seed):
                        yield Wanted(scene, name, seed)


def settings_of(arguments: argparse.Namespace, wanted: Wanted, records: list[Record], data: Path) -> Settings:
    """A run's settings."""
    tuning = wanted.scene == "tune"
    usual = METHODS[wanted.method].rate * RATE_FACTORS[arguments.common["task"]]
    return Settings(
        **{**arguments.common, **({"step_s": TUNED_AT_STEP_S} if tuning else {})},
        method=wanted.method,
        spec=METHODS[wanted.method].spec,
        scene="none" if tuning or METHODS[wanted.method].workers else wanted.scene,
        learning_rate=wanted.rate or rates_of(records, wanted.method).used or usual,
        workers=METHODS[wanted.method].workers or arguments.workers,
        seed=wanted.seed,
        folder="",
        data=str(data),
    )


def said(record: Record) -> str:
    """One line about a run."""
    scene = SCENES.get(record["scene"], record["scene"]).format(factor=record["slow_factor"])
    if not record["finished"]:
        lines = (record.get("last_words") or "").splitlines()
        last = [line.strip() for line in lines if any(map(str.isalnum, line))][-1:]  # torchrun ends with a rule
        return f"{record['method']}, {scene}: not finished after {record['took_s']:.0f} s: {' '.join(last)}"
    reached = record["time_to_target_s"]
    to_target = f"{reached:.1f} s to {record['target']:g}" if reached is not None else f"{record['target']:g} never"
    return (
        f"{record['method']}, {scene}: {to_target}, {record['wall_s']:.1f} s in all,"
        f" {100 * record['final_accuracy']:.1f} %"
    )


def show(arguments: argparse.Namespace, records: list[Record]) -> None:
    """Tables on the screen and in a file; pictures."""
    for scene in arguments.scenes:
        if of(records, scene=scene):
            print(f"\n{SCENES[scene].format(factor=records[0]['slow_factor'])}\n")
            print("\n".join(table(records, scene, arguments.target)))
    worst = max((one["stolen_share"] for one in records if one["scene"] in SCENES), default=0.0)
    if worst > MOST_STOLEN:
        print(
            f"\nThe machine's host gave up to {100 * worst:.0f} % of its cores' time away during a run: mind the seconds."
        )
    folder = ROOT / ("runs" if arguments.small else "docs")
    for theme, text in pictures(records, arguments.target).items():
        path = folder / f"head-to-head-{theme}.svg"
        path.write_text(text)
        print(f"{'' if theme == 'dark' else chr(10)}Picture: {path.relative_to(ROOT)}")
    if not arguments.small:
        arguments.runs.with_suffix(".md").write_text(markdown(records))


if __name__ == "__main__":
    main()
