"""Reads a Spark session for both ways of training: its slots, its driver's address, and a job's result."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.errors import PacelineError, UsageError, WorkerLostError
from paceline.integrations.spark_failures import first_cause
from paceline.membership.join_point import JoinPoint
from paceline.transport.keys import Keys, new_keys

_BETWEEN_LOOKS_S = 0.2


def check_installed(who: str) -> None:
    """Refuses to continue if the extra of the caller `who` is not installed, and names it."""
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]  # noqa: F401
        import pyspark  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{who} needs its packages: pip install 'paceline[spark]'.") from error


def num_workers(who: str, dataframe: Any, asked: int | None, deadline_s: float) -> int:
    """The number of tasks to run for the caller `who`: all slots if none is asked for. Waits for executors that start.

    With Spark Connect, only the session's settings can tell the number of slots, if they do.

    Raises:
        UsageError: Spark has fewer slots than asked for, or their number is unknown.
    """
    settings, context = dataframe.sparkSession.conf, _context_of(dataframe)
    if asked is not None and settings.get("spark.dynamicAllocation.enabled", "false") == "true":
        return asked
    announced = _announced(settings)
    if context is None:
        slots = announced or asked
        if slots is None:
            raise UsageError(f"Spark Connect does not say how many slots there are: give {who}(workers=...).")
    else:
        until_s, wanted = time.monotonic() + deadline_s, asked or announced or 1
        while (slots := _slots(context)) < wanted and time.monotonic() < until_s:
            time.sleep(_BETWEEN_LOOKS_S)
    if slots < (asked or 1):
        raise UsageError(
            f"{who} needs {asked or 1} free slots, one for each worker, and Spark has {slots}"
            f" ({settings.get('spark.master')}): give workers={max(1, slots)}, or start Spark with more cores."
        )
    return asked or slots


def refuse_speculation(dataframe: Any, instead: str = "") -> None:
    """Raises `UsageError` if Spark may start a worker twice; `instead` is a second remedy for the message."""
    if dataframe.sparkSession.conf.get("spark.speculation", "false") == "true":
        raise UsageError(
            "spark.speculation starts a slow worker a second time while the first one lives, but a run has one place "
            f"for each worker: start Spark with spark.speculation=false{instead}."
        )


def _context_of(dataframe: Any) -> Any:
    """The session's SparkContext; None: it has none, as in Spark Connect."""
    try:
        return dataframe.sparkSession.sparkContext
    except Exception:  # its class exists only in newer Spark versions
        return None


def _announced(settings: Any) -> int | None:
    """Slots once all executors have started; None: the session does not say."""
    master = settings.get("spark.master", "")
    if of_driver := re.fullmatch(r"local(?:\[\s*(\d+)\s*(?:,.*)?\])?", master):
        executors, cores = "1", of_driver[1] or "1"
    elif own := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        executors, cores = own.groups()
    else:
        executors, cores = settings.get("spark.executor.instances", None), settings.get("spark.executor.cores", None)
    if executors is None or cores is None:
        return None
    return max(1, int(executors) * (int(cores) // int(settings.get("spark.task.cpus", "1"))))


def _slots(context: Any) -> int:
    """The number of tasks that can run at the same time."""
    spark = context._jsc.sc()
    try:
        return spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile())
    except Exception:  # a private API of Spark, which may change
        return context.defaultParallelism // int(context.getConf().get("spark.task.cpus", "1"))


@contextlib.contextmanager
def job_meeting(
    who: str, dataframe: Any, workers: int | None, host: str | None, deadline_s: float
) -> Iterator[tuple[int, Keys, JoinPoint]]:
    """The number of tasks, new keys, and the driver's meeting with its tasks, at a port that the system chooses.

    Raises:
        UsageError: there are fewer slots, or the session does not give their number or the host.
    """
    workers, keys = num_workers(who, dataframe, workers, deadline_s), new_keys()
    host = host or _driver_host(who, dataframe)
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    with contextlib.closing(JoinPoint(address, keys, deadline_s, role="holder")) as join_point:
        yield workers, keys, join_point


def meet_driver(who: str, address: str, keys: Keys, reach_s: float, partition: int) -> JoinPoint:
    """Connects a task of `who` (for messages) to the driver; raises WorkerLostError if the driver cannot be reached."""
    try:
        return JoinPoint(address, keys, reach_s, role="guest")
    except WorkerLostError as error:
        raise WorkerLostError(
            f"The task of partition {partition} cannot reach the driver at {address} within {reach_s:g} s:"
            f" give {who}(host=...) an address of the driver's machine that executors can reach."
        ) from error


def _driver_host(who: str, dataframe: Any) -> str:
    """The address by which executors reach this process, if it is known; `who` is the caller's name."""
    if _context_of(dataframe) is None:
        raise UsageError(f"Spark Connect does not say how executors reach this process: give {who}(host=...).")
    settings = dataframe.sparkSession.conf
    if settings.get("spark.master").startswith("local"):
        return "127.0.0.1"
    name = settings.get("spark.driver.host")
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"The driver's host {name} is not known here ({error.strerror}): give {who}(host=...)."
        ) from None


def collected(
    dataframe: Any, task: Any, schema: str, join_point: JoinPoint, workers: int, **options: Any
) -> list[dict[str, Any]]:
    """Runs the task on each partition; returns the rows that the tasks report, or raises a failure's first cause."""
    try:
        return [row.asDict() for row in dataframe.mapInArrow(_in_arrow(task.run), schema, **options).collect()]
    except Exception as error:
        raise PacelineError(first_cause(error, join_point, workers)) from None


def _in_arrow(run: Callable[[Iterator[Any]], list[dict[str, Any]]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Wraps a task for `mapInArrow`; Spark serializes it with all that it refers to, including the user's functions."""

    def of_partition(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow  # pyright: ignore[reportMissingImports]

        if rows := run(batches):
            yield pyarrow.RecordBatch.from_pylist(rows)

    return of_partition
