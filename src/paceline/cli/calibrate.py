"""`paceline calibrate`: measures this machine, or a launcher's workers, for the simulator's cluster file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli import options
from paceline.cli.console import print_json, results, stages
from paceline.errors import UsageError
from paceline.run.fork_server import fork_server_context
from paceline.system.paths import check_new_file

if TYPE_CHECKING:
    from paceline.advice.calibration.cluster_file import MeasuredCluster
    from paceline.advice.calibration.machine import Calibration
    from paceline.simulator import Cluster


def calibrate(
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of simulated workers; default: the number of cores")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for seconds only, less exactly.")] = False,
    data: options.Data = None,
    file: Annotated[Path, options.in_run("--out", help="Cluster file to write, TOML or JSON.")] = Path("cluster.toml"),
    hosts: Annotated[bool, options.in_run("--hosts", help="Under a launcher: write host names into the file.")] = False,
    force: Annotated[bool, options.in_run("--force", help="Replace an existing file.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure steps, memory and messages on this machine, and write them to a cluster file for `simulate`.

    Works best on an otherwise idle machine. Under a launcher, all workers measure, and their links are measured too.

    Example: paceline calibrate --task mnist-mlp --out here.toml

    Example: torchrun --nnodes 4 ... -m paceline calibrate --out cluster.toml
    """
    options.check_numbers({"batch_size": batch_size, "workers": workers, "data": data})
    if not _launched():
        _check_file(file, replace=force)
        fork_server_context()  # its server loads PyTorch while this process does
    from paceline.membership.environment import current_environment

    measure = {"batch_size": batch_size, "data": data, "quick": quick}
    environment = current_environment()
    if environment is None:
        _check_file(file, replace=force)
        _alone(task, file, workers, as_json, measure)
        return
    if workers is not None:
        raise UsageError(
            f"--workers {workers}: under a launcher, all of its workers are measured; leave --workers out."
        )
    from paceline.advice.calibration.cluster import measure_together, meet_others

    with meet_others(environment) as group, group.fail_together():
        if group.worker_id == 0:
            _check_file(file, replace=force)
        if group.num_workers == 1:
            _alone(task, file, None, as_json, measure)
            return
        with stages() as tell:
            first = group.worker_id == 0  # which reports for all
            progress = (lambda what: tell(f"Measuring {what}")) if first else (lambda _: None)
            measured = measure_together(group, task or "digits-mlp", **measure, on_progress=progress)
        if measured is not None:
            measured = replace(measured, names_hosts=hosts)
            _write(measured, measured.as_cluster(), task, file, as_json=as_json)
        group.what = "writing the file"
        group.tell()


def _alone(task: str | None, file: Path, workers: int | None, as_json: bool, how: dict[str, Any]) -> None:
    from paceline.advice.calibration.machine import measure

    with stages() as tell:
        measured = measure(task or "digits-mlp", **how, on_progress=lambda what: tell(f"Measuring {what}"))
    _write(measured, measured.as_cluster(workers), task, file, as_json=as_json)


def _write(
    measured: Calibration | MeasuredCluster, cluster: Cluster, task: str | None, file: Path, *, as_json: bool
) -> None:
    """Writes the cluster file, and says what is in it and how to use it."""
    from paceline.advice.calibration.machine import write_file

    write_file(cluster, measured.comments(cluster), file)
    console = results(as_json=as_json)
    for line in measured.summary(cluster):
        name, _, figures = line.partition(": ")
        console.print(Text.assemble(f"{name}: ", (figures, "bold")))
    console.print(f"Written: {file}")
    how = f"--task {task or measured.task} --batch-size {measured.batch_size}"
    console.print(f"Use it:  paceline simulate --cluster {file} {how}")
    if as_json:
        print_json(measured.as_json(cluster, file))


def _launched() -> bool:
    """Whether a launcher may have started this process; needs no PyTorch."""
    return "PACELINE_JOIN" in os.environ or ("MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ)


def _check_file(file: Path, *, replace: bool) -> None:
    """Rejects a file that cannot be written, or that would replace another one, before measuring."""
    if file.suffix not in (".toml", ".json"):
        raise UsageError(f"--out {file}: a cluster file is .toml or .json.")
    check_new_file(file, f"--out {file}")
    if file.exists() and not replace:
        raise UsageError(f"--out {file} exists; add --force to replace it, or name another file.")
