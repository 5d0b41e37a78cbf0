"""`paceline simulate`: one task, one algorithm, simulated workers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import say
from paceline.cli.train import end, settings, show
from paceline.errors import NotWrittenError, UsageError
from paceline.replica.slowness import slow_factors
from paceline.specs.bounds import PARAMETERS
from paceline.system.machine import uncollected

if TYPE_CHECKING:
    from paceline.simulator import Cluster, Faults

__all__ = ["described", "simulate"]

_CLUSTER = "The cluster"


def simulate(
    task: options.Task = None,
    algorithm: Annotated[str | None, typer.Option(help="Spec, as leashed(persistence=1); default hogwild")] = None,
    workers: Annotated[int | None, typer.Option(help="How many; default: the cluster's, or 2")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML or JSON file: speeds, workers.", rich_help_panel=_CLUSTER)
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="WORKER:FACTOR on its compute time; again for more.", rich_help_panel=_CLUSTER),
    ] = None,
    slow_link: Annotated[
        list[str] | None,
        typer.Option(help="A-B:FACTOR on the time of messages between two.", rich_help_panel=_CLUSTER),
    ] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="WORKER:STEP at which it dies; again for more.", rich_help_panel=_CLUSTER)
    ] = None,
    timing_only: Annotated[
        bool, typer.Option("--timing-only", help="No gradients, only times.", rich_help_panel=_CLUSTER)
    ] = False,
    parameters: Annotated[
        int | None, typer.Option(help="For timing only: so many, not the task's.", rich_help_panel=_CLUSTER)
    ] = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    target_loss: options.TargetLoss = None,
    target_accuracy: options.TargetAccuracy = None,
    batch_size: options.BatchSize = None,
    learning_rate: options.LearningRate = None,
    momentum: options.Momentum = None,
    optimizer: options.Optimizer = None,
    inject_staleness: options.InjectStaleness = None,
    staleness_ramp_epochs: options.StalenessRampEpochs = None,
    partition: options.Partition = None,
    placement: options.Placement = None,
    restarts: options.Restarts = None,
    seed: options.Seed = None,
    data: options.Data = None,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Train on simulated workers: real gradients, virtual time, the same result each time.

    Example: paceline simulate --task digits-mlp --algorithm leashed --workers 16 --slow 0:100 --seed 1
    """
    given = settings(locals())  # before anything else becomes a local name
    options.check_numbers(given)
    if parameters is not None:
        PARAMETERS.check("--parameters", parameters)
    if out is not None:
        options.check_out(out)

    with uncollected():  # PyTorch takes a fifth less
        from paceline.run.config import TrainConfig
        from paceline.run.simulate_task import simulate_task

    simulated, faults = described(cluster, workers, slow or [], slow_link or []), _faults(kill or [])
    faults.check(simulated.workers)
    known = {one.name for one in dataclasses.fields(TrainConfig)}
    if placement is not None and simulated.sockets is None:
        raise UsageError("--placement is about sockets: add [sockets] to a cluster file, and --cluster FILE.")
    config = TrainConfig(**{key: value for key, value in given.items() if key in known})
    config = dataclasses.replace(config, workers=simulated.workers)
    options.check_specs(config)
    options.tell_what_is_overridden([config])
    word = config.algorithm.partition("(")[0]
    not_written = None
    with options.out_folder(out, "simulated", options.task_word(config.task), word) as folder:
        say(f"{config.task}: {config.algorithm}, {config.workers} simulated workers, into {folder}")
        try:
            run = simulate_task(
                config,
                cluster=simulated,
                timing_only=timing_only,
                num_parameters=parameters,
                faults=faults,
                out=folder,
                command=options.write_command(sys.argv[1:]),
            )
        except NotWrittenError as error:
            if error.run is None:
                raise
            run, not_written = error.run, error
    show(run, folder, as_json=as_json)
    end(run, not_written)


def _faults(kills: list[str]) -> Faults:
    """What the command line says goes wrong."""
    from paceline.simulator import Faults

    faults = Faults()
    for text in kills:
        worker, _, step = text.partition(":")
        try:
            faults = faults.kill(worker=int(worker), step=int(step))
        except ValueError as error:
            why = f" {error}" if isinstance(error, UsageError) else " Write WORKER:STEP, as 2:40."
            raise UsageError(f"--kill {text} says nothing about a worker.{why}") from error
    return faults


def described(path: Path | None, workers: int | None, slow: list[str], slow_link: list[str]) -> Cluster:
    """The cluster of the file, or the default, with what the command line says about workers and links."""
    from paceline.simulator import Cluster

    cluster = Cluster.load(path) if path is not None else Cluster()
    if workers is not None:
        cluster = dataclasses.replace(cluster, workers=workers)
    for worker, factor in slow_factors(slow).items():
        try:
            cluster = cluster.slow(worker=worker, factor=factor)
        except UsageError as error:
            raise UsageError(f"--slow {worker}:{factor:g} says nothing about a worker. {error}") from error
    for text in slow_link:
        link, _, factor = text.partition(":")
        a, _, b = link.partition("-")
        try:
            cluster = cluster.slow_link(int(a), int(b), float(factor))
        except ValueError as error:
            why = f" {error}" if isinstance(error, UsageError) else " Write A-B:FACTOR, as 0-1:10."
            raise UsageError(f"--slow-link {text} says nothing about a link.{why}") from error
    return cluster
