"""`paceline advise FILE.py:train`: which algorithm, and how many workers, reach a target soonest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import complain, print_json, results, say, stages
from paceline.cli.simulate import described
from paceline.errors import UsageError, shown
from paceline.observe.words import seconds_text
from paceline.specs.bounds import DEATHS_PER_S, PLANNED_WORKERS, SECONDS_ABOVE_0, SEED, check_workers
from paceline.specs.text import closest, split_specs
from paceline.system.folder_lock import run_folder
from paceline.system.machine import num_cores

if TYPE_CHECKING:
    from paceline.advice.answer import Advice

_in_target, _in_what = options.panel("What to reach"), options.panel("What to choose from")
_in_happens, _in_run = options.panel("Conditions"), options.panel("The advice")
_MOST_SEEDS = 10**7  # runs and simulations count up from the first
_KINDS = ("layers", "backups")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?) ?([a-z]*)")


def training(
    program: Annotated[
        str,
        typer.Argument(metavar="FILE.py:FUNCTION", help="Training function, or a built-in task", show_default=False),
    ],
    target_loss: Annotated[float | None, _in_target(help="Training loss to reach.")] = None,
    target_accuracy: Annotated[float | None, _in_target(help="Test accuracy to reach, from 0 to 1.")] = None,
    deadline: Annotated[str | None, _in_target(help="Rank by what is reached by then: 90, 90s, 5m, 2h.")] = None,
    algorithm: Annotated[list[str] | None, _in_what(help="Comma-separated specs; default: all that fit")] = None,
    max_workers: Annotated[int | None, _in_what(help="Maximum; default: the cluster's, or the number of cores")] = None,
    cluster: Annotated[
        Path | None, _in_happens(help="Cluster file (TOML or JSON); default: this machine, measured.")
    ] = None,
    slow: Annotated[list[str] | None, _in_happens(help=options.SLOW)] = None,
    kill_rate: Annotated[str | None, _in_happens(help="Kills per worker: 1/h, 2/d, 0.5/min.")] = None,
    budget: Annotated[str, _in_run(help="Time to measure and simulate: 90s, 5m.")] = "5m",
    seed: Annotated[int, _in_run(help="Random seed of runs and simulations.")] = 0,
    data: Annotated[Path | None, _in_run(help="Folder of data sets; default $PACELINE_DATA")] = None,
    folder: Annotated[Path | None, _in_run("--out", help="Folder for the report; default runs/advice-...")] = None,
    yes: Annotated[bool, _in_run("--yes", help="Allow the loop to write to absolute paths.")] = False,
    as_json: Annotated[bool, _in_run("--json", help="Print JSON as the last line of stdout.")] = False,
) -> None:
    """Which algorithm, and how many workers, reach a target soonest.

    Ranks candidates, with 90 % intervals, by short runs on this machine, models fitted to them, and simulations. Your loop
    runs in scratch folders, and its output goes to prints.log. Other advice: paceline advise layers, paceline advise
    backups.

    Example: paceline advise train.py:train --target-accuracy 0.96 --max-workers 8 --slow 0:4
    """
    options.check_numbers({"target_loss": target_loss, "target_accuracy": target_accuracy, "data": data, "seed": seed})
    _check_program(program)
    if target_loss is None and target_accuracy is None:
        raise UsageError("Give a target: --target-accuracy 0.96, or --target-loss 0.1.")
    if target_loss is not None and target_loss <= 0:
        raise UsageError(f"--target-loss must be above 0, not {target_loss:g}.")
    deadline_s = None if deadline is None else seconds(deadline, "--deadline")
    budget_s = seconds(budget, "--budget")
    kills_per_s = 0.0 if kill_rate is None else per_second(kill_rate, "--kill-rate")
    if max_workers is not None:
        PLANNED_WORKERS.check("--max-workers", max_workers)
    SEED.check("The last run's seed", seed + _MOST_SEEDS)
    options.check_out(folder)
    machines = None if cluster is None else described(cluster, None, None, None)
    if machines is None and max_workers is not None:
        check_workers(max_workers, backend="processes")
    most = max_workers or (max(2, num_cores()) if machines is None else machines.workers)
    factors = dict(described(None, most, slow, None).slowness) if slow else {}
    specs = _specs(algorithm)

    from paceline.advice.answer import Circumstances, Target

    target = Target(loss=target_loss, accuracy=target_accuracy, deadline_s=deadline_s)
    circumstances = Circumstances(
        slow=factors, kills_per_s=kills_per_s, cluster=None if cluster is None else str(cluster)
    )
    with options.out_folder(folder, "advice", options.task_word(program)) as place, run_folder(place):
        from paceline.advice.advise import advise
        from paceline.advice.answer import as_json as as_plain
        from paceline.advice.report import write_report
        from paceline.advice.words import verdict
        from paceline.records.run_data import write_json

        log = place / "prints.log"
        say(f"Advice on {program}, with {most} workers at most")
        try:
            with stages() as tell:
                found = advise(
                    program, target=target, max_workers=most, circumstances=circumstances, algorithms=specs,
                    budget_s=budget_s, data=data, seed=seed, log=log, writes_elsewhere=yes, on_progress=tell,
                )  # fmt: skip
        except UsageError:  # leaves nothing behind
            log.unlink(missing_ok=True)
            raise
        answer = as_plain(found)
        write_json(place / "advice.json", answer)
        page = write_report(found, place / "advice.html", command=options.write_command())
    _show(found, page, as_json=as_json)
    if as_json:
        print_json(answer, allow_nan=False)
    if found.best is None:
        complain(verdict(found))
        raise typer.Exit(1)


def seconds(text: str, option: str) -> float:
    """The seconds of `90`, `90s`, `5m`, `5min`, `2h` or `1d`.

    Raises:
        UsageError: it is none of these, or not above 0; the message names the option.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    unit_s = _UNITS_S.get(match[2] or "s") if match else None
    value_s = float(match[1]) * unit_s if match and unit_s else 0.0
    if not 0 < value_s < math.inf:
        raise UsageError(f"{option} must be a duration above 0, such as 90, 90s, 5m or 2h, not {shown(text)}.")
    SECONDS_ABOVE_0.check(f"{option} {text}, in seconds,", value_s)
    return value_s


def per_second(text: str, option: str) -> float:
    """The rate of `1/h`, `2/d`, `0.5/min` or `0.1/s`, per second; 0 is never.

    Raises:
        UsageError: it is none of these; the message names the option.
    """
    count, slash, unit = (part.strip() for part in text.lower().partition("/"))
    try:
        value = float(count) if slash or count == "0" else math.nan
    except ValueError:
        value = math.nan
    unit_s = _UNITS_S.get(unit, math.nan) if slash else 1.0
    rate = value / unit_s
    if not 0 <= rate < math.inf:
        raise UsageError(f"{option} must be a rate, such as 1/h, 2/d or 0.5/min, not {shown(text)}.")
    DEATHS_PER_S.check(f"{option} {text}, per second,", rate)
    return rate


def _check_program(program: str) -> None:
    """Rejects a misspelt verb, which would otherwise be taken for a program."""
    if ".py" in program:
        return
    from paceline.tasks.load import BUILT_IN

    if program not in BUILT_IN:
        hint = closest(program, [*_KINDS, *BUILT_IN])
        raise UsageError(
            f"'{program}' is neither a program nor a kind of advice.{hint} Write FILE.py:FUNCTION, a built-in task"
            f" ({', '.join(BUILT_IN)}), or one of {', '.join(_KINDS)}."
        )


def _specs(texts: list[str] | None) -> list[str] | None:
    if texts is None:
        return None
    from paceline.algorithms import registry

    return list(dict.fromkeys(registry.spec(registry.build(one)) for text in texts for one in split_specs(text)))


def _show(advice: Advice, page: Path, *, as_json: bool) -> None:
    from rich.text import Text

    from paceline.advice.tables import fits_table, ranking_table
    from paceline.advice.words import asked, remarks, verdict
    from paceline.observe.terminal import terminal_table

    console = results(as_json=as_json)
    console.print(f"{advice.program}: {asked(advice)}", soft_wrap=False)
    console.print(ranking_table(advice))
    if advice.best is not None:
        console.print(Text(f"\n{verdict(advice)}", style="bold"), soft_wrap=False)
        _list(console, "", advice.reasons)
    _list(console, "Mind", [*advice.warnings, *remarks(advice.ranked)])
    _list(console, "Not tried", advice.not_tried)
    if advice.fits:
        console.print("\nErrors of the models on data left out (loss and error rate: above the optimum):")
        console.print(terminal_table(fits_table(advice)))
    console.print(f"\nIt took {seconds_text(advice.took_s)}.")
    if advice.command:
        console.print(Text("Start it: ").append(advice.command, style="bold"))
    console.print(f"Report:   {page}")


def _list(console: Any, title: str, lines: Sequence[str]) -> None:
    """Prints sentences as separate paragraphs, wrapped with an indent."""
    from rich.padding import Padding

    if title and lines:
        console.print(f"\n{title}:")
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2)))
