"""`paceline train`: one task, one algorithm, real workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.cli import options
from paceline.cli.console import complain, err, print_json, results, say
from paceline.errors import NotWrittenError, UsageError
from paceline.observe.words import workers_text
from paceline.run.fork_server import fork_server_context

if TYPE_CHECKING:
    from rich.text import Text

    from paceline.observe.progress import LiveTable, Progress
    from paceline.records.run_data import RunData
    from paceline.run.config import TrainConfig

Run = TypeVar("Run", bound="RunData | None")


@options.with_config()
def train(
    given: dict[str, Any],
    *,
    slow: Annotated[list[str] | None, options.in_run(help=options.SLOW)] = None,
    out: options.Out = None,
    tensorboard: Annotated[
        bool, options.in_run("--tensorboard", help="Write curves to tensorboard/ in --out.")
    ] = False,
    resume: Annotated[Path | None, options.in_run(help="Resume this run with its configuration.")] = None,
    as_json: options.Json = False,
) -> None:
    """Train one task with one algorithm; write trace, report and result.

    Example: paceline train --task mnist-mlp --algorithm "leashed(persistence=2)" --workers 4
    """
    if slow:
        given["slow"] = options.slow_factors(slow)
    options.check_numbers(given)
    if resume is not None:
        given = _resumed(resume, given)
    options.check_out(out, resume)

    fork_server_context()  # its server loads PyTorch while this process does
    from paceline.run.config import TrainConfig

    if tensorboard:
        from paceline.integrations.tensorboard import check_tensorboard

        check_tensorboard()
    known = {one.name for one in dataclasses.fields(TrainConfig)}
    given = {key: value for key, value in given.items() if key in known}
    try:
        config = TrainConfig(**given)
    except UsageError as error:
        if resume is None:
            raise
        raise UsageError(
            f"{resume / 'config.json'} is damaged, or conflicts with the options given now: {error}"
        ) from error
    options.check_numbers(given)
    options.check_specs([config])
    import paceline.run.train  # noqa: F401  (now: a signal during imports ends the process at once and leaves its files)

    words = options.task_word(config.task), config.algorithm.partition("(")[0]
    with options.out_folder(out or resume, *words) as folder:
        run, not_written = execute(config, folder, resume=resume, tensorboard=tensorboard)
    show(run, not_written, folder, as_json=as_json)


def execute(
    config: TrainConfig, folder: Path, *, resume: Path | None = None, tensorboard: bool = False
) -> tuple[RunData, NotWrittenError | None]:
    """Trains into a folder, with live figures on stderr; returns the run, and its error if some files were not written."""
    from paceline.run.train import train as run_training

    command = options.write_command()
    title = f"{config.task}: {config.algorithm}, {workers_text(config.workers)}, into {folder}"
    with live_table(title, folder, "paceline train") as live, contextlib.ExitStack() as opened:
        shows, board = [live.update], None
        if tensorboard:
            from paceline.integrations.tensorboard import TensorBoard

            board = opened.enter_context(TensorBoard(folder / "tensorboard"))
            shows.append(board.update)

        def told(progress: Progress) -> None:
            for show_it in shows:
                show_it(progress)

        run, not_written = finished(
            partial(run_training, config, out=folder, resume=resume, command=command, on_progress=told)
        )
        if board is not None:
            board.end(run)
        return run, not_written


@contextlib.contextmanager
def live_table(title: str, folder: Path, command: str) -> Iterator[LiveTable]:
    """A live table on stderr; after an interrupt, prints the command that resumes the run."""
    from paceline.observe.progress import LiveTable

    try:
        with LiveTable(title, console=err()) as live:
            yield live
    except KeyboardInterrupt:
        if (folder / "checkpoint").is_dir():
            say(f"Resume from the last checkpoint: {command} --resume {folder}")
        raise


def finished(run: Callable[[], Run]) -> tuple[Run, NotWrittenError | None]:
    """A finished run, and the error if some of its files could not be written."""
    try:
        return run(), None
    except NotWrittenError as error:
        if error.run is None:
            raise
        return error.run, error


def show(run: RunData, not_written: NotWrittenError | None, folder: Path, *, as_json: bool) -> None:
    """Prints the outcome, the figures and the files; with `as_json` also the result as stdout's last line.

    Exits with code 1 and a message if the run crashed or one of its files is missing.
    """
    from paceline.observe.tables import result_table

    console = results(as_json=as_json)
    console.print(result_table(run.result))
    if run.result["outcome"] in ("diverged", "crashed"):
        console.print(outcome_line(run.result))
    console.print(f"Report: {folder / 'report.html'}")
    console.print(f"Trace:  {folder / 'trace.json'} (open it at ui.perfetto.dev)")
    if as_json:
        print_json(read_result(run, folder))
    if not_written is not None:
        complain(str(not_written))
    if not_written is not None or run.result["outcome"] == "crashed":
        raise typer.Exit(1)


def outcome_line(result: dict[str, Any]) -> Text:
    """The outcome; a divergence or crash stands out and names the step."""
    from rich.text import Text

    outcome = result["outcome"]
    style = {"converged": "bold green", "stopped": "bold", "diverged": "bold yellow", "crashed": "bold red"}[outcome]
    at = f" after {result['steps']:,} updates" if result.get("steps") is not None else ""
    reason = str(result.get("outcome_reason") or "").strip()
    return Text.assemble((outcome.capitalize(), style), at, f": {reason}" if reason else ".")


def read_result(run: RunData, folder: Path) -> dict[str, Any]:
    """The run's result exactly as in `result.json`, where null replaces numbers that JSON does not have."""
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.is_file() else run.result


def _resumed(resume: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run to resume; the user's options replace its values."""
    saved = options.read_resumed(resume, of_function=False)
    for one, other in (("epochs", "steps"), ("target_loss", "target_accuracy")):
        if one in given or other in given:
            saved.pop(one, None)
            saved.pop(other, None)
    return {**saved, **given}
