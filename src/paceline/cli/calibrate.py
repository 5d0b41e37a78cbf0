"""`paceline calibrate`: this machine, measured, as a cluster file for the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import err, out, say
from paceline.errors import UsageError
from paceline.fork_server import fork_server_context

__all__ = ["calibrate"]


def calibrate(
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    workers: Annotated[int | None, typer.Option(help="To be simulated; default: as many as cores")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In seconds, less exactly.")] = False,
    data: options.Data = None,
    file: Annotated[
        Path, typer.Option("--out", help="The cluster file, TOML or JSON.", rich_help_panel="The run")
    ] = Path("cluster.toml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace that file if it exists.", rich_help_panel="The run")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, and write a cluster file that `simulate` reads: steps, memory, messages.

    Works best on an otherwise idle machine. Example: paceline calibrate --task mnist-mlp --out here.toml
    """
    options.check_numbers({"batch_size": batch_size, "workers": workers, "data": data})
    _check_file(file, replace=force)
    fork_server_context()  # it loads PyTorch while this process does
    from paceline import calibration

    with err().status("Measuring", spinner="line") as status:

        def progress(what: str) -> None:
            status.update(f"Measuring {what}")
            if not err().is_terminal:
                say(f"Measuring {what}")

        measured = calibration.measure(
            task or "digits-mlp", batch_size=batch_size, data=data, quick=quick, on_progress=progress
        )
    cluster = calibration.as_cluster(measured, workers)
    calibration.write(measured, cluster, file)
    console = err() if as_json else out()
    for name, spread in measured.spreads().items():
        console.print(f"{name}: [bold]{calibration.describe(spread)}[/]", soft_wrap=True)
    console.print(f"Written: {file}", markup=False, soft_wrap=True)
    how = f"--task {measured.task if task is None else task} --batch-size {measured.batch_size}"
    console.print(f"Use it:  paceline simulate --cluster {file} {how}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(calibration.as_json(measured, cluster, file)), flush=True)


def _check_file(file: Path, *, replace: bool) -> None:
    """Refuses a file that cannot be written, or that would replace another one, before anything is measured."""
    if file.suffix not in (".toml", ".json"):
        raise UsageError(f"--out {file}: a cluster file is .toml or .json.")
    if not file.parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {file.parent}; make it first.")
    if file.is_dir():
        raise UsageError(f"--out {file} is a folder; name a file.")
    if file.exists() and not replace:
        raise UsageError(f"--out {file} exists; add --force to replace it, or name another file.")
