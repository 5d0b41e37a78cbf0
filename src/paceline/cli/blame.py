"""`paceline blame`: which worker made a recorded run slow, by what, and what would help."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import print_json, results
from paceline.errors import UsageError


def blame(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, real or simulated.")],
    as_json: options.Json = False,
) -> None:
    """Find the worker that made a run slow, and why.

    Follows the critical path through the recorded steps: from the end of the run back, and from each wait to the
    worker that ended it. Simulates a remedy with the recorded speeds.

    Example: paceline blame runs/one
    """
    from paceline.advice.remedies import remedy
    from paceline.model_parallel.graph.program import algorithm_named
    from paceline.observe.blame import NOTE, sentence, table
    from paceline.observe.blame import blame as find
    from paceline.observe.terminal import terminal_table
    from paceline.observe.waits import is_divided
    from paceline.records.run_data import RunData

    recorded = RunData.load(run)
    spec = recorded.result.get("algorithm") or recorded.config.get("algorithm")
    if not spec:
        raise UsageError(f"{run} has no algorithm in its result.json: blame reads runs that have ended.")
    algorithm = algorithm_named(spec)
    known = {"waits_for": algorithm.waits_for, "gossip": algorithm.gossip}  # to a run that has not written its result
    recorded.result = {**known, **recorded.result, "algorithm": spec}
    if is_divided(recorded):
        raise UsageError(
            f"{run} has a layout or a plan, in which workers wait within groups: blame reads runs without one."
        )
    found = find(recorded)
    if found is None:
        raise UsageError(f"{run} has no events: blame needs a run that has trained.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about algorithms that are only simulated
        change = remedy(recorded, found)
    console = results(as_json=as_json)
    console.print(sentence(found) + (f" {change}" if change is not None else ""), soft_wrap=True, highlight=False)
    console.print(terminal_table(table(found), notes=[NOTE]))
    if as_json:
        print_json({**asdict(found), "sentence": sentence(found), "remedy": asdict(change) if change else None})
