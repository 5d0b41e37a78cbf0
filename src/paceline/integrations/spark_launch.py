"""`pl.spark.launch`: runs a training function in Spark's tasks, each worker on its task's partition of a DataFrame."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.algorithms import Algorithm, registry
from paceline.errors import PacelineError, UsageError, shown
from paceline.integrations.spark_failures import failed_in, first_told
from paceline.integrations.spark_job import check_installed, collected, job_meeting, refuse_speculation
from paceline.integrations.spark_rows import Rows
from paceline.integrations.spark_worker import WorkerTask
from paceline.membership.elastic import check_joinable, trains_in_rounds
from paceline.membership.launched import check_algorithm
from paceline.observe.report import write_run
from paceline.records.run_data import RunData, read_events
from paceline.run.joined_result import joined_result
from paceline.specs.bounds import check_run
from paceline.system import tensor_files
from paceline.system.folder_lock import run_folder
from paceline.worker.chosen_algorithm import given_algorithm

_SCHEMA = "about string, events binary, model binary"
_REACH_S = 15.0  # for executors that are just starting, and for tasks to find the driver
_WHO = "pl.spark.launch"


@dataclass(slots=True)
class SparkRun(RunData):
    """The result of `launch`: a run as of `paceline.launch`, and its model.

    Args:
        state_dict: of the trained model, the same on all workers.
    """

    state_dict: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def launch(
    train: Callable[[Rows], Any],
    *,
    workers: int,
    data: Any,
    algorithm: Algorithm | str = "ad-psgd",
    seed: int = 0,
    host: str | None = None,
    out: Path | str | None = None,
    deadline_s: float = 600.0,
) -> SparkRun:
    """Calls `train(rows)` in one of Spark's tasks for each worker; inside, `attach` makes them one run.

    `rows` is a data set of the rows of the task's partition, which other workers do not see:
    `worker.batches(rows.loader(batch_size=32))` iterates over all of them. Each task keeps them in a memory-mapped file, and
    runs the function in its own process.

    Methods that survive a death (`ad-psgd`) run in ordinary tasks. A task that Spark restarts takes the dead worker's place,
    with a neighbour's model, and iterates over its rows from the beginning, unless the others are about to end. If `train`
    raises an exception and no later attempt succeeds, the run fails when it ends. All other methods that need no shared
    memory run in a barrier stage; Spark ends its job when a task fails: call `launch` again.

    In lockstep (`all-reduce` and similar) a worker that has used up its batches takes part in the others' rounds. So if
    workers have different numbers of batches, the loop must step once per batch and must not `break` out of an epoch. If they
    have equal numbers, all must make the same calls, or they wait for each other until the deadline.

    Costs: a shuffle that distributes the rows evenly, except for ordinary tasks if the data has one partition per worker; per
    worker, disk space on an executor for its rows, and a process. Each worker, in a barrier stage one of them, returns the
    model, within spark.driver.maxResultSize.
    Use when: the data is in Spark, and you write the loop.
    Not: `DeepDist`, which keeps the model at the driver, and counts every update once even if tasks die.

    Args:
        train: a function of the rows; sent by value if executors cannot import it. Its return value is discarded.
        workers: number of tasks, which Spark must be able to run at once.
        data: a DataFrame of Spark.
        algorithm: spec or instance.
        seed: of the order in which `rows.loader` draws.
        host: address of the driver's machine by which executors reach it; None: `spark.driver.host`.
        out: folder for events, result, trace, report and `model.pt`; None: nothing is written.
        deadline_s: how long workers wait for each other.

    Returns:
        The run: records, `result`, and the model's `state_dict`.

    Raises:
        UsageError: the run cannot be launched with these arguments, such as more workers than free slots.
        PacelineError: the first cause of the failure, or an exception of `train` after which no attempt succeeded.
    """
    check_installed(_WHO)
    if not callable(train):
        raise UsageError(f"{_WHO} runs a function of a task's rows, not {shown(train)}.")
    check_run({"workers": workers, "seed": seed})
    chosen = given_algorithm(algorithm)
    if chosen is None:
        raise UsageError(f"{_WHO} needs an algorithm to choose the kind of Spark stage: give algorithm=...")
    chosen.check(workers)
    in_barrier = _needs_all(chosen, workers)
    spec = registry.spec(chosen)
    if not in_barrier:
        refuse_speculation(data, ", or choose a lockstep algorithm, whose tasks Spark starts once")
    with job_meeting(_WHO, data, workers, host, _REACH_S) as (workers, keys, meeting), _folder(out) as folder:
        task = WorkerTask(
            meeting.address,
            keys,
            _pickled(train),
            spec,
            workers,
            in_barrier,
            seed,
            _REACH_S,
            deadline_s,
        )
        # A barrier stage rejects partitions that it coalesces or unions itself: a shuffle moves that to an earlier stage.
        parts = data if not in_barrier and _num_partitions(data) == workers else data.repartition(workers)
        options = {"barrier": True} if in_barrier else {}
        rows = collected(parts, task, _SCHEMA, meeting, workers, **options)
        if told := first_told(meeting, workers, "raised"):  # and no later attempt has succeeded
            raise PacelineError(failed_in(told))
        about = {
            "task": str(getattr(train, "__name__", "train")),
            "algorithm": spec,
            "workers": workers,
            "backend": "spark",
            "seed": seed,
            "command": " ".join(sys.argv),
        }
        run = _run_of(about, rows, folder, gossip=chosen.gossip)
        if out is not None:
            write_run(run, folder, title=f"{about['task']}: {spec}", command=about["command"])
        return run


def _needs_all(algorithm: Algorithm, workers: int) -> bool:
    """Whether all workers must be present, in a barrier stage; refuses an algorithm that cannot run in tasks."""
    if trains_in_rounds(algorithm):  # Spark starts a failed task anew, but rounds let in no worker with rows of its own
        return True
    try:
        check_joinable(algorithm, workers)
    except UsageError:
        check_algorithm(registry.spec(algorithm), algorithm.needs)
        return True
    return False


def _num_partitions(data: Any) -> int | None:
    """The number of partitions; None: Spark Connect does not say."""
    try:
        return data.rdd.getNumPartitions()
    except Exception:  # its class exists only in newer Spark versions
        return None


def _pickled(train: Callable[[Rows], Any]) -> bytes:
    from pyspark import cloudpickle  # pyright: ignore[reportMissingImports]

    try:
        return cloudpickle.dumps(train)
    except Exception as error:
        raise UsageError(f"The function to train cannot be sent to Spark's tasks: {error}.") from error


@contextlib.contextmanager
def _folder(out: Path | str | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as name:
            yield Path(name)
        return
    with run_folder(Path(out)):
        yield Path(out)


def _run_of(about: dict[str, Any], rows: list[dict[str, Any]], folder: Path, *, gossip: bool) -> SparkRun:
    """The run, from its workers' files; raises PacelineError if the run has no result."""
    own: list[dict[str, Any]] = []
    records = {}
    for row in rows:
        one = json.loads(row["about"])
        events = folder / f"events-{one['worker']}.jsonl"
        events.write_bytes(row["events"])
        records[one["worker"]] = read_events(events)
        own.append(one)
        if row["model"]:
            (folder / "model.pt").write_bytes(row["model"])
    notes = []
    if missing := about["workers"] - len(rows):
        notes.append(f"{missing} of {about['workers']} tasks ended without a result.")
    result = joined_result(
        about,
        own,
        records,
        gossip=gossip,
        notes=notes,
        restarts=sum(one["attempt"] for one in own),
        reason="No worker called paceline.attach.",
    )
    if result["outcome"] == "crashed":
        raise PacelineError(result["outcome_reason"])
    state = tensor_files.load(folder / "model.pt", "the run's model")
    return SparkRun(dict(about), result, records, [], state_dict=state)
