"""`paceline replay`: computes a recorded run again, and shows the state at any update."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import print_json, results, say
from paceline.errors import UsageError
from paceline.system import files
from paceline.system.paths import check_new_file

if TYPE_CHECKING:
    from torch import nn

    from paceline.run.replay import RecordedRun, Replay, Update
    from paceline.specs.file_loop import FileLoop

_CHECK = "path/to/file.py:function"


def replay(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run of paceline train, or of a function of a file.")
    ],
    until: Annotated[int | None, typer.Option(help="Stop after this update, and show whose gradients it has.")] = None,
    bisect: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Find the first update after which FUNCTION(model) is true; under ad-psgd, of any worker's model.",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="With --until or --bisect: write parameters and gradients, for torch.load.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets; default: the run's.")] = None,
    as_json: options.Json = False,
) -> None:
    """Compute a recorded run again, in one process, and compare it bit for bit.

    The records say in which order the workers read and updated the parameters. The replay keeps that order and computes every
    gradient again. It compares the loss of each step, and the parameters with the checkpoint.

    Example: paceline replay runs/one --until 1200 --save update.pt
    """
    if until is not None and bisect is not None:
        raise UsageError("Give either --until or --bisect, not both.")
    if save is not None:
        if until is None and bisect is None:
            raise UsageError("--save needs an update: add --until UPDATE or --bisect FILE.py:FUNCTION.")
        check_new_file(save, "The saved update")

    from paceline.run.recorded_order import ReplayMismatchError
    from paceline.run.replay import RecordedRun

    recorded = RecordedRun(run, data, train=_loop_of(run))
    for warning in recorded.warnings():
        say(warning)
    try:
        if until is None and bisect is None:
            _show_equal(recorded.replay(), as_json=as_json)
            return
        update = recorded.at(until) if until is not None else _bisected(recorded, str(bisect))
    except ReplayMismatchError as error:
        if as_json:
            print_json({"equal": False, "version": error.version, "worker": error.worker_id, "reason": str(error)})
        raise
    if save is not None:
        _save(update, save)
    _show(recorded, update, as_json=as_json)


def _loop_of(run: Path) -> FileLoop | None:
    """The function of a file that `paceline launch` called, if that file is still there."""
    from paceline.specs.file_loop import load_loop

    result = files.read_json(run / "result.json", {})
    inputs = result.get("inputs")
    file = inputs.get("file") if isinstance(inputs, dict) else None
    is_there = isinstance(file, str) and Path(file).is_file()
    return load_loop(f"{file}:{result.get('task')}") if is_there else None


def _show_equal(replayed: Replay, *, as_json: bool) -> None:
    checkpoint = replayed.checkpoint
    same = (
        "; no checkpoint was compared" if checkpoint is None else f", and the parameters of checkpoint {checkpoint:,}"
    )
    text = f"Equal, bit for bit: {replayed.updates:,} updates, the losses of {replayed.steps:,} steps{same}."
    results(as_json=as_json).print(text, soft_wrap=True)
    if as_json:
        print_json({"equal": True, "updates": replayed.updates, "steps": replayed.steps, "checkpoint": checkpoint})


def _bisected(recorded: RecordedRun, reference: str) -> Update:
    from paceline.specs.user_file import load_function, run_user_code

    path_text, _, name = reference.rpartition(":")
    if not path_text.endswith(".py"):
        raise UsageError(f"'{reference}' does not name a function in a file, such as {_CHECK}.")
    path = Path(path_text)
    function = load_function(path, name, what="File", written=f"--bisect {_CHECK}")

    def holds(model: nn.Module) -> bool:
        return run_user_code(path, f"Function '{name}' of {path}", lambda: bool(function(model)))

    update = recorded.first(holds, told=lambda version, answer: say(f"After update {version:,}: {answer}"))
    if update is None:
        raise UsageError(
            f"{name} is false after the run's last update, {recorded.updates:,}: there is nothing to find."
        )
    return update


def _show(recorded: RecordedRun, update: Update, *, as_json: bool) -> None:
    console = results(as_json=as_json)
    console.print(
        f"Update {update.version:,} of {recorded.updates:,}: {recorded.config.task}, {recorded.config.algorithm}"
    )
    described = []
    for step in update.steps:
        samples = step["samples"].tolist() if step["samples"] is not None else None  # a loop may have no sampler
        one = {**step, "samples": samples, "gradient_norm": float(step["gradient"].norm())}
        del one["gradient"]
        described.append(one)
        console.print(
            f"worker {one['worker']}, step {one['step']}: batch {one['batch']}, computed at version {one['read_version']}, "
            f"{one['staleness']} updates late; loss {one['loss']:.6g}, gradient norm {one['gradient_norm']:.4g}",
            soft_wrap=True,
        )
        if samples is not None:
            console.print(f"  samples {', '.join(map(str, samples))}", soft_wrap=True)
    if as_json:
        print_json({"version": update.version, "steps": described})


def _save(update: Update, path: Path) -> None:
    import torch

    with files.replacing(path) as file:
        torch.save({"version": update.version, "model": update.model.state_dict(), "steps": update.steps}, file)
