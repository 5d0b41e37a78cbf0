"""The options that `train` and `compare` share, and their checks before any work begins."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import say
from paceline.errors import AlgorithmWarning, OverrideWarning, UsageError, shown
from paceline.specs.bounds import check_run
from paceline.system import files
from paceline.system.folder_lock import is_empty
from paceline.system.paths import check_new_folder

if TYPE_CHECKING:
    from paceline.run.config import TrainConfig


class _Backend(StrEnum):
    processes = "processes"
    threads = "threads"


class _OptimizerState(StrEnum):
    per_worker = "per-worker"
    shared = "shared"


_RUNS = Path("runs")
_MOST_FOLDERS = 10_000  # that commands create in one second
SLOW = "WORKER:FACTOR of its compute time; repeatable."


def panel(name: str) -> Callable[..., Any]:
    """`typer.Option` for the options in one panel of a verb's help."""
    return functools.partial(typer.Option, rich_help_panel=name)


in_training, in_run = panel("Training"), panel("The run")


def pairs(
    option: str,
    texts: Iterable[str] | None,
    form: str,
    key: Callable[[str], Any] = int,
    value: Callable[[str], Any] = float,
) -> dict[Any, Any]:
    """Parses the KEY:VALUE entries of an option.

    Raises:
        UsageError: an entry does not have the form `form`, or two have the same key.
    """
    found = {}
    for text in texts or ():
        left, _, right = text.rpartition(":")
        try:
            if not left or not right:
                raise ValueError
            name, amount = key(left), value(right)
        except ValueError:
            raise UsageError(f"{option} must be {form}, not {shown(text)}.") from None
        if name in found:
            raise UsageError(f"{option} names {shown(left)} twice: leave one out.")
        found[name] = amount
    return found


def slow_factors(texts: Iterable[str] | None) -> dict[int, float]:
    """Parses `--slow`: factors on compute time by worker."""
    return pairs("--slow", texts, "WORKER:FACTOR, as 0:100")


Task = Annotated[str | None, typer.Option(help="Built-in task or path/to/file.py:function; default digits-mlp")]
Epochs = Annotated[float | None, in_training(help="Passes of all workers over the data.")]
Steps = Annotated[int | None, in_training(help="Gradients per worker, instead of epochs.")]
BatchSize = Annotated[int | None, in_training(help="Samples per gradient; default: the task's")]
Data = Annotated[Path | None, in_run(help="Folder of data sets; default $PACELINE_DATA")]
Out = Annotated[Path | None, in_run(help="Folder for results; default runs/<task>-...")]
Json = Annotated[bool, in_run("--json", help="Print JSON as the last line of stdout.")]


def _option(kind: Any, help: str, option: Callable[..., Any] = typer.Option) -> Any:
    return Annotated[kind | None, option(help=help)]


# The fields of TrainConfig that verbs set.
_CONFIG = {
    "task": Task,
    "algorithm": _option(str, "Spec such as leashed(persistence=1); default all-reduce"),
    "workers": _option(int, "Number of workers; default 2"),
    "layout": _option(str, "How to shard the model, such as hybrid(groups=2)"),
    "epochs": Epochs,
    "steps": Steps,
    "target_loss": _option(float, "Stop at this training loss.", in_training),
    "target_accuracy": _option(float, "Stop at this test accuracy.", in_training),
    "batch_size": BatchSize,
    "learning_rate": _option(float, "Default: the algorithm's, else the task's", in_training),
    "momentum": _option(float, "Momentum, if the optimizer has one.", in_training),
    "optimizer": _option(str, "Spec: adamw(weight_decay=0.1); default sgd", in_training),
    "optimizer_state": _option(_OptimizerState, "Optimizer state per worker, or shared.", in_training),
    "inject_staleness": _option(str, "Delay in updates: 20, random(highest=40)", in_training),
    "staleness_ramp_epochs": _option(float, "Epochs over which the delay grows from 0.", in_training),
    "partition": _option(str, "dynamic, fixed, skewed(alpha=0.5); default the first", in_run),
    "placement": _option(str, "first-touch, interleave, bind(node=0); default the first", in_run),
    "backend": _option(_Backend, "Workers as processes (default) or threads", in_run),
    "restarts": _option(int, "Number of dead workers to replace; default 0", in_run),
    "min_workers": _option(int, "Wait for replacements below this; default 1", in_run),
    "seed": _option(int, "Seed of parameters, order, algorithm; default 0", in_run),
    "data": Data,
}


def with_config(*left_out: str, **replaced: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a verb, whose first parameter then receives the fields of TrainConfig that the user set.

    Args:
        left_out: fields for which the verb has no option.
        replaced: the verb's own options for other fields.
    """
    shared = {name: kind for name, kind in {**_CONFIG, **replaced}.items() if name not in left_out}

    def decorated(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in shared}
            words = {name: getattr(value, "value", value) for name, value in given.items() if value is not None}
            verb(words, **arguments)

        signature = inspect.signature(verb, eval_str=True)
        _, *own = signature.parameters.values()
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in shared.items()
        ]
        run.__dict__["__signature__"] = signature.replace(parameters=[*options, *own])
        run.__annotations__ = shared | {one.name: one.annotation for one in own}
        return run

    return decorated


def check_numbers(given: Mapping[str, Any]) -> None:
    """Rejects invalid numbers; `given`: the fields of TrainConfig that the user set.

    Raises:
        UsageError: the message names the option.
    """
    check_run(given, name_of=_spelled)
    for one, other in (("epochs", "steps"), ("target_loss", "target_accuracy")):
        if given.get(one) is not None and given.get(other) is not None:
            raise UsageError(f"{_spelled(one)} and {_spelled(other)} exclude each other; leave one out.")
    data = given.get("data")
    if data is not None and not Path(data).is_dir():
        raise UsageError(f"--data {data} is not a folder; check the path.")


def check_specs(configs: Iterable[TrainConfig]) -> None:
    """Builds every object named in the configurations, so that a misspelt name fails early.

    Warns if an algorithm ignores some of the user's optimizer options, or hardly trains.

    Raises:
        UsageError: an unknown task, algorithm, optimizer, partition or placement, or a bad argument of one.
    """
    from paceline.specs.registry import check_optimizer
    from paceline.tasks import load_task

    lines: dict[str, None] = {}
    for config in {(one.algorithm, one.workers): one for one in configs}.values():
        algorithm = config.built_algorithm
        check_optimizer(config.optimizer, config.learning_rate, config.momentum)
        config.resolved(load_task(config.task))
        for said in filter(None, (algorithm.overrides, algorithm.caution(config.workers))):
            lines[f"{config.algorithm}: {said}"] = None
    for line in lines:
        say(line)
    for category in (OverrideWarning, AlgorithmWarning):  # for Python programs
        warnings.simplefilter("ignore", category)


def check_out(out: Path | None, resume: Path | None = None) -> None:
    """Rejects a folder that is not writable or not empty, unless it is the run to resume; None: a new one will be made."""
    if out is None or (resume is not None and out.resolve() == resume.resolve()):
        return
    check_new_folder(out, f"--out {out}")
    if out.is_dir() and not is_empty(out):
        go_on = f", or continue that run: --resume {out}" if (out / "config.json").is_file() else ""
        raise UsageError(f"--out {out} is not empty; choose another folder{go_on}.")


def read_resumed(resume: Path, *, of_function: bool) -> dict[str, Any]:
    """The configuration of a run to resume, of a function or of a task.

    Raises:
        UsageError: the folder contains no run or no checkpoint, or a run of the other kind.
    """
    if not (resume / "config.json").is_file():
        raise UsageError(f"--resume {resume} is not a run's folder: it has no config.json.")
    if not (resume / "checkpoint").is_dir():
        raise UsageError(f"--resume {resume} has no checkpoint to resume from; start a new run with another --out.")
    saved = files.read_checked_json(resume / "config.json")
    if of_function and "limit_samples" not in saved:  # `launch` writes it for a goal
        raise UsageError(f"--resume {resume} is a run of a task: resume it with `paceline train --resume {resume}`.")
    if not of_function and "limit_samples" in saved:
        raise UsageError(
            f"--resume {resume} is a run of a function: resume it with `paceline launch FILE.py:FUNCTION --resume {resume}`,"
            f" or in Python with launch(..., resume='{resume}')."
        )
    return saved


@contextlib.contextmanager
def out_folder(out: Path | None, *words: str) -> Iterator[Path]:
    """The user's folder, or a new one, `runs/<words>-<time>`, which is removed again if it stays empty.

    Concurrent commands get different folders.
    """
    if out is not None:
        yield out
        return
    made_parent = not _RUNS.exists()
    made = _new_folder(*words)
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):  # not empty, as expected
            made.rmdir()
            if made_parent:
                _RUNS.rmdir()


def _new_folder(*words: str) -> Path:
    name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", word).strip("-.") for word in words)
    stem = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 0
    while True:
        number += 1
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            # The name is taken, or another command has just removed the parent.
            if not isinstance(error, FileExistsError | FileNotFoundError) or number == _MOST_FOLDERS:
                raise UsageError(str(files.not_written(stem, error))) from error


def task_word(reference: str) -> str:
    """A task's name for a folder name: `digits-mlp`, or the function of `path/to/file.py:function`."""
    return reference.rpartition(":")[2]


def write_command() -> str:
    """The command line, quoted for a shell."""
    import shlex

    return shlex.join(["paceline", *sys.argv[1:]])


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
