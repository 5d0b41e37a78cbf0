"""`paceline simulate`: one task, one algorithm, simulated workers."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.console import say
from paceline.cli.train import finished, show
from paceline.errors import UsageError
from paceline.specs.bounds import PARAMETERS
from paceline.system.machine import uncollected

if TYPE_CHECKING:
    from paceline.simulator import Cluster, Faults

_in_cluster = options.panel("The cluster")


@options.with_config(
    "layout",
    "optimizer_state",
    "backend",
    "min_workers",
    workers=Annotated[int | None, typer.Option(help="Number of workers; default: the cluster's, or 2")],
)
def simulate(
    given: dict[str, Any],
    *,
    cluster: Annotated[Path | None, _in_cluster(help="Cluster file, TOML or JSON.")] = None,
    like: Annotated[
        Path | None, _in_cluster(metavar="RUN", help="Take speeds, links and deaths from a recorded run's folder.")
    ] = None,
    slow: Annotated[list[str] | None, _in_cluster(help=options.SLOW)] = None,
    slow_link: Annotated[list[str] | None, _in_cluster(help="A-B:FACTOR of message times; repeatable.")] = None,
    kill: Annotated[list[str] | None, _in_cluster(help="WORKER:STEP at which it dies; repeatable.")] = None,
    timing_only: Annotated[bool, _in_cluster("--timing-only", help="Simulate times only, no gradients.")] = False,
    parameters: Annotated[int | None, _in_cluster(help="Number of parameters for --timing-only.")] = None,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Train on simulated workers: real gradients, virtual time, the same result each time.

    Example: paceline simulate --task digits-mlp --algorithm leashed --workers 16 --slow 0:100
    """
    options.check_numbers(given)
    if parameters is not None:
        PARAMETERS.check("--parameters", parameters)
    options.check_out(out)

    with uncollected():  # saves a fifth of PyTorch's time
        from paceline.run.config import TrainConfig
        from paceline.run.measured_cluster import recorded_conditions
        from paceline.run.simulate_task import simulate_task

    faults, found = _faults(kill), None
    if like is not None:
        if cluster is not None or kill or "workers" in given:
            raise UsageError(
                "--like takes the workers and their deaths from the run: leave out --cluster, --workers and --kill."
            )
        found = recorded_conditions(like)
        faults, given = found.faults, {"restarts": found.restarts, **given}
    simulated = described(cluster if found is None else found.cluster, given.get("workers"), slow, slow_link)
    faults.check(simulated.workers)
    if "placement" in given and found is not None:
        raise UsageError(
            "--placement needs a machine with sockets, which --like does not describe: leave one of them out."
        )
    if "placement" in given and simulated.sockets is None:
        raise UsageError(
            "--placement needs a machine with sockets: add [sockets] to a cluster file and pass it with --cluster FILE."
        )
    config = TrainConfig(**{**given, "workers": simulated.workers})
    options.check_specs([config])
    word = config.algorithm.partition("(")[0]
    with options.out_folder(out, "simulated", options.task_word(config.task), word) as folder:
        say(f"{config.task}: {config.algorithm}, {config.workers} simulated workers, into {folder}")
        run, not_written = finished(
            partial(
                simulate_task, config, cluster=simulated, timing_only=timing_only, num_parameters=parameters,
                faults=faults, out=folder, command=options.write_command(),
            )
        )  # fmt: skip
    show(run, not_written, folder, as_json=as_json)


def _faults(kills: list[str] | None) -> Faults:
    from paceline.simulator import Faults

    faults = Faults()
    for worker, step in options.pairs("--kill", kills, "WORKER:STEP, as 2:40", value=int).items():
        faults = faults.kill(worker=worker, step=step)
    return faults


def described(
    known: Cluster | Path | None, workers: int | None, slow: list[str] | None, slow_link: list[str] | None
) -> Cluster:
    """The cluster, or that of the file, or the default, with the command line's options about workers and links."""
    from paceline.simulator import Cluster

    cluster = Cluster.load(known) if isinstance(known, Path) else known or Cluster()
    if workers is not None:
        cluster = dataclasses.replace(cluster, workers=workers)
    for worker, factor in options.slow_factors(slow).items():
        cluster = cluster.slow(worker=worker, factor=factor)
    for (a, b), factor in options.pairs("--slow-link", slow_link, "A-B:FACTOR, as 0-1:10", _link).items():
        cluster = cluster.slow_link(a, b, factor)
    return cluster


def _link(text: str) -> tuple[int, int]:
    a, b = map(int, text.split("-"))
    return a, b
