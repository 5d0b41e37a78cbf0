"""`paceline launch`: your own training in several workers; a function under a supervisor, or a script on many machines."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.cli import options
from paceline.cli.console import say
from paceline.errors import NotWrittenError, PacelineError, UsageError
from paceline.loop.slowness import checked_factors
from paceline.observe.words import workers_text
from paceline.run.fork_server import fork_server_context
from paceline.specs.bounds import COUNT, DEADLINE_S, SECONDS_ABOVE_0, check_workers
from paceline.specs.file_loop import is_loop, load_loop

_in_function, _in_together = options.panel("With a function"), options.panel("With a script, and other machines")
_FUNCTION_ONLY = ("target_loss", "target_accuracy", "limit", "slow", "seed", "resume")
_SCRIPT_ONLY = ("join", "of", "key", "deadline")
_WORKERS = 2  # default
_PASSED_ON = ("workers", "algorithm", "seed", "restarts", "min_workers", "resume", "target_loss", "target_accuracy")
_RESUMED = ("workers", "algorithm", "seed", "slow", "target_loss", "target_accuracy")


class LaunchCommand(TyperCommand):
    """Allows options after a function; everything after a script belongs to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        ctx.allow_interspersed_args = any(map(is_loop, ours))
        return super().parse_args(ctx, args)


def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            help="Training function in a file; or, after --, a script and its arguments",
            metavar="FILE.py:FUNCTION | -- SCRIPT.py ...",
        ),
    ],
    workers: Annotated[int | None, typer.Option(help="Number of workers on this machine; default 2")] = None,
    target_loss: Annotated[float | None, _in_function(help="Stop at this training loss.")] = None,
    target_accuracy: Annotated[float | None, _in_function(help="Stop at this accuracy (`evaluate` of attach).")] = None,
    limit: Annotated[float | None, _in_function(help="Stop after this many seconds.")] = None,
    slow: Annotated[list[str] | None, _in_function(help=options.SLOW)] = None,
    seed: Annotated[int | None, _in_function(help="Random seed of sample order and algorithm.")] = None,
    resume: Annotated[
        Path | None, _in_function(help="Resume this run of the same function with its configuration.")
    ] = None,
    join: Annotated[
        str | None,
        _in_together(
            metavar="HOST:PORT",
            help="Address on one machine where all workers meet. Default: this machine only.",
        ),
    ] = None,
    of: Annotated[
        int | None,
        _in_together(help="Workers on all machines, for which training waits. Default: the first machine's value."),
    ] = None,
    key: Annotated[
        Path | None,
        _in_together(help="Key file from `paceline key`, required off loopback; default $PACELINE_KEY"),
    ] = None,
    deadline: Annotated[
        int | None,
        _in_together(help="Seconds to wait for missing workers; default 600. Waits 40 s for a silent one."),
    ] = None,
    algorithm: Annotated[
        str | None, options.in_run(help="Spec; default: the algorithm of attach, else all-reduce")
    ] = None,
    restarts: Annotated[int, options.in_run(help="Number of dead workers to replace.")] = 0,
    min_workers: Annotated[
        int | None, options.in_run(help="Wait for replacements if fewer workers are left; default 1.")
    ] = None,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Run your own training in several workers: a function of a file, or a script on each of several machines.

    A function runs under a supervisor, with every algorithm, targets and a report.
    A script's workers survive the loss of each other, of --join's machine and of this command. Late workers replace dead ones.

    Example: paceline launch train.py:train --workers 4 --algorithm leashed --target-accuracy 0.96

    Example: paceline launch --join 10.0.0.1:29400 --of 8 --key run.key --algorithm all-reduce -- train.py --epochs 5
    """
    given = {name: value for name, value in locals().items() if value is not None}
    options.check_numbers({name: given[name] for name in ("workers", "restarts", "min_workers") if name in given})
    if len(command) == 1 and is_loop(command[0]):
        _refuse(given, _SCRIPT_ONLY, "is for scripts, whose workers may be on other machines: leave it out here.")
        options.check_numbers(given)
        _launch_function(command[0], {"workers": _WORKERS, **_resumed(resume, given)})
        return
    _refuse(
        given, _FUNCTION_ONLY, "is for a function, as in `paceline launch FILE.py:FUNCTION`: leave it out for a script."
    )
    workers = _WORKERS if workers is None else workers
    check_workers(workers, backend="programs")
    if of is not None:
        COUNT.check("--of", of)
    if deadline is not None:
        DEADLINE_S.check("--deadline", deadline)
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(
            f"There is no script {command[0]}: write `paceline launch --workers 4 -- SCRIPT.py ARGUMENTS`, or"
            " `paceline launch FILE.py:FUNCTION`."
        )
    options.check_out(out)
    if key is None and os.environ.get("PACELINE_KEY"):
        key = Path(os.environ["PACELINE_KEY"])

    from paceline.cli.train import finished, show
    from paceline.run.launch_script import Agent, free_address, name_of

    with options.out_folder(out, "launch", name_of(command)) as folder:
        agent = Agent(
            command=command,
            address=join or free_address(),
            workers=workers,
            of=of,
            key=key,
            algorithm=algorithm,
            restarts=restarts,
            deadline_s=deadline or 600,
            folder=folder,
            say=say,
            trains=not _calibrates(command),
            min_workers=min_workers,
        )
        run, not_written = finished(agent.run)
    if agent.refused(run):
        raise typer.Exit(2)
    if run is None:
        raise typer.Exit(1 if agent.failed else 0)
    show(run, not_written, folder, as_json=as_json)


def _refuse(given: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if given.get(name) not in (None, []):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _resumed(resume: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The given options, completed by those of the run to resume, except its limits, which may have stopped it."""
    if resume is None:
        return given
    saved = options.read_resumed(resume, of_function=True)
    found = {name: saved[name] for name in _RESUMED if saved.get(name) is not None}
    try:
        options.check_numbers(found)
        found["slow"] = checked_factors(found.get("slow", {}), found.get("workers", _WORKERS))
    except (TypeError, UsageError) as error:
        raise UsageError(f"{resume / 'config.json'} is damaged: {error}") from error
    if "target_loss" in given or "target_accuracy" in given:
        found = {name: value for name, value in found.items() if not name.startswith("target_")}
    return {**found, **given}


def _launch_function(reference: str, given: dict[str, Any]) -> None:
    """Runs a function of a file under supervision, with live figures on stderr."""
    workers, algorithm, out, resume = given["workers"], given.get("algorithm"), given.get("out"), given.get("resume")
    limit_s = given.get("limit")
    if limit_s is not None:
        SECONDS_ABOVE_0.check("--limit", limit_s)
    slow = given.get("slow", {})
    if isinstance(slow, list):
        slow = checked_factors(options.slow_factors(slow), workers)
    options.check_out(out, resume)

    fork_server_context()  # its server loads PyTorch while this process does
    from paceline.algorithms import registry
    from paceline.cli.train import finished, live_table, show
    from paceline.records.run_data import RunData
    from paceline.run.launch import launch as run_launch

    if algorithm is not None:
        registry.build(algorithm).check(workers)
    loop = load_loop(reference)
    words = [loop.path.stem, *([algorithm.partition("(")[0]] if algorithm else [])]
    with options.out_folder(out or resume, "launch", *words) as folder:
        title = f"{reference}: {algorithm or 'as attach says'}, {workers_text(workers)}, into {folder}"
        try:
            with live_table(title, folder, f"paceline launch {reference}") as live:
                passed_on = {name: given[name] for name in _PASSED_ON if name in given}
                run, not_written = finished(
                    partial(
                        run_launch, loop, out=folder, limit_s=limit_s, slow=slow, on_progress=live.update, **passed_on
                    )
                )
        except (UsageError, NotWrittenError):
            raise
        except PacelineError:
            if not (folder / "result.json").is_file():
                raise
            run, not_written = RunData.load(folder), None  # its outcome says that it crashed
    show(run, not_written, folder, as_json=given["as_json"])


def _calibrates(command: list[str]) -> bool:
    """Whether the workers run `paceline calibrate`, as a module or a file; they write their own file instead of a run."""
    words = command[1:] if command[0] == "-m" else [Path(command[0]).name, *command[1:]]
    return words[:2] == ["paceline", "calibrate"]
