"""`paceline launch`: your own script in several workers, on one machine or many, that outlive each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import say
from paceline.errors import UsageError

__all__ = ["launch"]

_TOGETHER, _RUN = "With other machines", "The run"


def launch(
    command: Annotated[
        list[str], typer.Argument(help="SCRIPT.py and its arguments, after --", metavar="-- SCRIPT.py ...")
    ],
    workers: Annotated[int, typer.Option(help="How many start on this machine.")] = 2,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where all workers meet: an address of one machine, the same everywhere. Default: this machine alone.",
            rich_help_panel=_TOGETHER,
        ),
    ] = None,
    of: Annotated[
        int | None,
        typer.Option(
            help="Workers on all machines; training starts when they are there. Default: as the first machine to come says.",
            rich_help_panel=_TOGETHER,
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="Key file that encrypts, made by `paceline key`; needed off loopback; default $PACELINE_KEY",
            rich_help_panel=_TOGETHER,
        ),
    ] = None,
    deadline: Annotated[
        int, typer.Option(help="Seconds that workers wait for each other.", rich_help_panel=_TOGETHER)
    ] = 600,
    algorithm: Annotated[
        str | None, typer.Option(help="Spec; default: what attach names, else ad-psgd", rich_help_panel=_RUN)
    ] = None,
    restarts: Annotated[int, typer.Option(help="Dead workers of this machine to replace.", rich_help_panel=_RUN)] = 0,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Run your training script in workers that outlive each other; on each machine, if you have several.

    A worker, the machine that holds --join, or this command may die: the others go on. A worker that comes late takes a dead
    one's place. torchrun, in contrast, ends all when one dies. Single workers join with PACELINE_JOIN=HOST:PORT.

    Example: paceline launch --join 10.0.0.1:29400 --workers 4 --of 8 --key run.key -- train.py --epochs 5
    """
    options.check_numbers({"workers": workers, "restarts": restarts})
    if of is not None and of < 1:
        raise UsageError(f"--of must be 1 or more, not {of}.")
    if deadline < 1:
        raise UsageError(f"--deadline must be 1 second or more, not {deadline}.")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(
            f"There is no script {command[0]}: write `paceline launch --workers 4 -- SCRIPT.py ARGUMENTS`."
        )
    if out is not None:
        options.check_out(out)
    if key is None and os.environ.get("PACELINE_KEY"):
        key = Path(os.environ["PACELINE_KEY"])

    from paceline.agent import Agent, free_address, name_of
    from paceline.cli.train import show

    folder = out or options.default_out("launch", name_of(command), str(os.getpid()))
    agent = Agent(
        command=command,
        address=join or free_address(),
        workers=workers,
        of=of,
        key=key,
        algorithm=algorithm,
        restarts=restarts,
        deadline_s=deadline,
        folder=folder,
        say=say,
    )
    run = agent.run()
    if agent.refused:
        raise typer.Exit(2)
    show(run, folder, as_json=as_json)
    if run.result["outcome"] == "crashed":
        raise typer.Exit(1)
