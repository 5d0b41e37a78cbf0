"""`paceline train`: one task, one algorithm, real workers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import err, out, say
from paceline.errors import UsageError
from paceline.fork_server import fork_server_context
from paceline.slow_workers import slow_factors

if TYPE_CHECKING:
    from rich.text import Text

    from paceline.config import TrainConfig
    from paceline.observe.run import RunData

__all__ = ["execute", "outcome_line", "settings", "train"]


def train(
    task: options.Task = None,
    algorithm: Annotated[str | None, typer.Option(help="Spec, as leashed(persistence=1); default hogwild")] = None,
    workers: Annotated[int | None, typer.Option(help="How many; default 2")] = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    target_loss: options.TargetLoss = None,
    target_accuracy: options.TargetAccuracy = None,
    batch_size: options.BatchSize = None,
    learning_rate: options.LearningRate = None,
    momentum: options.Momentum = None,
    optimizer: options.Optimizer = None,
    optimizer_state: options.OptimizerState = None,
    inject_staleness: options.InjectStaleness = None,
    staleness_ramp_epochs: options.StalenessRampEpochs = None,
    partition: options.Partition = None,
    placement: options.Placement = None,
    backend: options.Backend = None,
    restarts: options.Restarts = None,
    slow: options.Slow = None,
    seed: options.Seed = None,
    data: options.Data = None,
    out: options.Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run, as configured there.", rich_help_panel="The run")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train one task with one algorithm; write trace, report and result.

    Example: paceline train --task mnist-mlp --algorithm "leashed(persistence=2)" --workers 4 --target-accuracy 0.97
    """
    given = settings(locals())  # before anything else becomes a local name
    if slow:
        given["slow"] = slow_factors(slow)
    options.check_numbers(given)
    if resume is not None:
        given = _resumed(resume, given)
        options.check_numbers(given)
    if out is not None and (resume is None or out.resolve() != resume.resolve()):
        options.check_out(out)

    fork_server_context()  # it loads PyTorch while this process does
    from paceline.config import TrainConfig

    known = {one.name for one in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{key: value for key, value in given.items() if key in known})
    options.check_specs(config)
    options.tell_what_is_overridden([config])
    folder = out or resume or options.default_out(options.task_word(config.task), config.algorithm.partition("(")[0])
    run = execute(config, folder, resume=resume)
    show(run, folder, as_json=as_json)
    if run.result["outcome"] == "crashed":
        raise typer.Exit(1)


def settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """TrainConfig's fields among a verb's arguments, as far as the user gave them."""
    others = ("out", "resume", "as_json", "repeats", "cluster", "slow", "slow_link", "timing_only", "parameters")
    return {
        key: getattr(value, "value", value)  # of an enumeration's member
        for key, value in arguments.items()
        if key not in others and value is not None
    }


def execute(config: TrainConfig, folder: Path, *, resume: Path | None = None) -> RunData:
    """Train into a folder, with live figures on stderr."""
    from paceline.observe.progress import LiveTable
    from paceline.training import train as run_training

    command = options.write_command(sys.argv[1:])
    workers = f"{config.workers} worker{'s' if config.workers > 1 else ''}"
    title = f"{config.task}: {config.algorithm}, {workers}, into {folder}"
    try:
        with LiveTable(title, console=err()) as live:
            return run_training(config, out=folder, resume=resume, command=command, on_progress=live.update)
    except KeyboardInterrupt:
        if (folder / "checkpoint").is_dir():
            say(f"Go on from the last checkpoint: paceline train --resume {folder}")
        raise


def show(run: RunData, folder: Path, *, as_json: bool) -> None:
    """The outcome, the figures and the files; with `as_json` also the result as stdout's last line."""
    from paceline.observe.tables import result_table

    console = err() if as_json else out()
    console.print(result_table(run.result))
    if run.result["outcome"] in ("diverged", "crashed"):
        console.print(outcome_line(run.result), soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    console.print(f"Trace:  {folder / 'trace.json'} (open it at ui.perfetto.dev)", soft_wrap=True)
    if as_json:
        print(json.dumps(read_result(run, folder)), flush=True)


def outcome_line(result: dict[str, Any]) -> Text:
    """The outcome; a divergence or crash stands out and says at which step."""
    from rich.text import Text

    outcome = result["outcome"]
    style = {"converged": "bold green", "stopped": "bold", "diverged": "bold yellow", "crashed": "bold red"}[outcome]
    at = f" after {result['steps']:,} updates" if result.get("steps") is not None else ""
    reason = str(result.get("outcome_reason") or "").strip()
    return Text.assemble((outcome.capitalize(), style), at, f": {reason}" if reason else ".")


def read_result(run: RunData, folder: Path) -> dict[str, Any]:
    """The run's result exactly as `result.json` has it: numbers that JSON cannot write are null there."""
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.is_file() else run.result


def _resumed(resume: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run to go on with; what the user gave now replaces what it had."""
    path = resume / "config.json"
    if not path.is_file():
        raise UsageError(f"--resume {resume} is no run's folder: it has no config.json.")
    if not (resume / "checkpoint").is_dir():
        raise UsageError(f"--resume {resume} has no checkpoint to go on from; start it anew with another --out.")
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}); start the run anew with another --out.") from error
    for one, other in (("epochs", "steps"), ("target_loss", "target_accuracy")):
        if one in given or other in given:
            saved.pop(one, None)
            saved.pop(other, None)
    if saved.get("data") is not None:
        saved["data"] = Path(saved["data"])
    return {**saved, **given}
