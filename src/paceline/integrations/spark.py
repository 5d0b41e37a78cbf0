"""DeepDist on Spark: a model at the driver, `gradient` on the partitions of a DataFrame, `descent` on the model.

Needs the extra `paceline[spark]`, on the driver and on the executors.

>>> with DeepDist(model, workers=4) as dd:  # doctest: +SKIP
...     told = dd.train(dataframe, gradient, descent, epochs=3)
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from paceline.algorithms import Algorithm, parse, registry
from paceline.errors import UsageError
from paceline.integrations.spark_job import check_installed, collected, job_meeting, refuse_speculation
from paceline.integrations.spark_master import Master
from paceline.integrations.spark_task import Descent, Gradient, PartitionTask
from paceline.membership.join_point import JoinPoint
from paceline.memory.arena import Arena
from paceline.observe.progress import Progress
from paceline.worker.hosted_servers import HostedServers
from paceline.worker.memberships.memory import own_arena

_SCHEMA = "partition long, attempt long, rows long, first long, steps long, skipped long, sent_bytes long"
_TAKEN = ("fetch", "push", "codec")  # of Downpour's arguments


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Args:
        updates: applied to the model, each once.
        steps: gradients computed for them, not counting repeated work.
        samples: rows in the updates.
        partitions: number of non-empty partitions.
        restarts: attempts at partitions beyond each one's first.
        mean_staleness: updates applied between a worker's fetch and its own update; None: there were no updates.
        sent_bytes: by the server, and by the last attempt at each partition.
        duration_s: from the start of Spark's job to its end.
    """

    updates: int
    steps: int
    samples: int
    partitions: int
    restarts: int
    mean_staleness: float | None
    sent_bytes: int
    duration_s: float


class DeepDist:
    """A master model that Spark's tasks train: Downpour-like SGD on the executors that hold the data.

    Each task reads its partition once into a memory-mapped file, which it uses for all epochs. It has a copy of the model,
    fetches the master's parameters every `fetch` steps, and pushes the sum of its updates every `push` steps; between two
    fetches it applies its own updates to its copy. The tasks are ordinary ones: Spark restarts a dead task, and the new
    attempt continues after its partition's last update at the master: every update counts once.

    The key is only in the function that Spark sends to its executors. Tasks and driver send each other vectors, never
    pickles. On one machine, messages stay inside the kernel; between machines they are encrypted.

    Costs: per partition its own size on an executor's disk, a model, and up to two vectors; at the driver one more vector. All
    updates go through the driver's one thread.
    Use when: the data is in Spark, and tasks may die or have different speeds.
    Not: training in lockstep, for which Spark has TorchDistributor (`docs/launchers.md`); models beyond one machine's memory.

    Args:
        model: the master; trained in place. Its buffers do not change, in any task.
        algorithm: a `downpour` with any of the arguments `fetch`, `push` and `codec`.
        workers: maximum number of partitions, and so of tasks; None: Spark's number of slots. More partitions are coalesced.
        host: address of the driver's machine by which executors reach it; None: `spark.driver.host`.
        deadline_s: how long a task tries to reach the driver.

    Attributes:
        model: the master.

    Raises:
        UsageError: the extra is missing, or an argument is wrong.

    Differs from DeepDist of 2014: `gradient` gets one batch at a time and not a partition's iterator; updates are arrays by
        the names of the model's parameters, and no pickles; the model is a `torch.nn.Module`; `min_updates` and `max_updates`
        are gone, as every fetch gets the newest parameters.
    Reference: Dirk Neumann, DeepDist, 2014; Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm | str = "downpour(fetch=10,push=10)",
        *,
        workers: int | None = None,
        host: str | None = None,
        deadline_s: float = 15.0,
    ) -> None:
        check_installed("DeepDist on Spark")
        if not isinstance(model, nn.Module):
            raise UsageError(f"DeepDist trains a torch.nn.Module, not {type(model).__name__}.")
        if workers is not None and workers < 1:
            raise UsageError(f"workers of DeepDist must be 1 or more, not {workers}.")
        self.model = model
        self._algorithm = _checked(parse(algorithm) if isinstance(algorithm, str) else algorithm)
        self._workers, self._host, self._deadline_s = workers, host, deadline_s

    def __enter__(self) -> DeepDist:
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: each `train` has stopped its server."""

    def train(
        self,
        dataframe: Any,
        gradient: Gradient,
        descent: Descent,
        epochs: int = 1,
        *,
        batch_size: int = 128,
        seed: int = 0,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Trained:
        """Trains the model on the DataFrame's rows.

        Args:
            dataframe: of Spark; its columns are the batches' names.
            gradient: `gradient(model, batch)`, on executors, returns an update: arrays by the names of the model's parameters
                (missing ones count as zero) or one array per parameter in their order; None: no update. A batch is a dict from
                columns to tensors (n,), (n, k) for lists of numbers, or lists of all other values. `.grad` is None before
                each call.
            descent: `descent(model, update)`, at the driver, sequentially and without autograd: applies an update, a dict
                from all parameters' names to tensors, to the model; it must keep its state in the model. Also runs in the
                tasks, on their copies, between two fetches.
            epochs: passes over the rows; each task shuffles its rows in every pass.
            batch_size: rows of a step; the last step of an epoch has the remainder.
            seed: of the shuffling.
            on_progress: called with the progress, in another thread.

        Raises:
            UsageError: an argument is wrong, there are fewer slots than workers, or `spark.speculation` is on.
            PacelineError: the first cause of the failure; the model is as the last update left it.
        """
        for name, value in (("epochs", epochs), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} of DeepDist.train must be a whole number of 1 or more, not {value!r}.")
        refuse_speculation(dataframe)
        job = job_meeting("DeepDist", dataframe, self._workers, self._host, self._deadline_s)
        with job as (workers, keys, join_point):
            task = PartitionTask(
                join_point.address,
                keys,
                copy.deepcopy(self.model),
                gradient,
                descent,
                self._algorithm,
                workers + 1,
                epochs,
                batch_size,
                seed,
                self._deadline_s,
            )
            begun_s = time.monotonic()
            with _served(
                Master(self.model, descent, self._algorithm, join_point, on_progress), workers + 1, join_point
            ) as master:
                rows = collected(dataframe.coalesce(workers), task, _SCHEMA, join_point, workers)
            master.tell()
            return _trained(master, rows, time.monotonic() - begun_s)


def _checked(algorithm: Algorithm) -> Any:
    """The algorithm; refuses arguments that tasks do not support, or that `descent` makes ineffective."""
    spec = registry.spec(algorithm)
    if not {*_TAKEN} <= {one.name for one in fields(algorithm)}:
        raise UsageError(
            f"DeepDist's tasks fetch and push like downpour, not like {spec}: choose downpour(fetch=10,push=10)."
        )
    plain = type(algorithm)()
    others = [one.name for one in fields(algorithm) if one.name not in _TAKEN]
    if chosen := [name for name in others if getattr(algorithm, name) != getattr(plain, name)]:
        raise UsageError(
            f"{spec}: DeepDist's one server applies updates with your descent function, so {', '.join(chosen)} "
            f"{('have' if chosen[1:] else 'has')} no effect: leave it out."
        )
    return algorithm


@contextlib.contextmanager
def _served(master: Master, num_members: int, join_point: JoinPoint) -> Iterator[Master]:
    """Runs the master's server; the error that stopped it is raised at the end, in place of its consequences."""
    binding = master.updates.binding
    arena = own_arena(binding, master.algorithm, num_workers=num_members, worker_id=num_members - 1)
    master.bind(Arena(arena.segment, arena.plan, num_members).shared.x)
    servers = HostedServers(master.algorithm, arena, join_point, 0, host=join_point.host, key=join_point.key)
    try:
        yield master
    finally:
        try:
            servers.close()
        finally:
            binding.release()
            arena.segment.close()


def _trained(master: Master, rows: list[dict[str, int]], duration_s: float) -> Trained:
    ledger = master.ledger
    return Trained(
        updates=ledger.updates,
        steps=sum(row["steps"] - row["skipped"] for row in rows),
        samples=ledger.samples,
        partitions=sum(row["rows"] > 0 for row in rows),
        restarts=sum(row["attempt"] for row in rows),
        mean_staleness=ledger.staleness / ledger.updates if ledger.updates else None,
        sent_bytes=master.counts.sent_bytes + sum(row["sent_bytes"] for row in rows),
        duration_s=duration_s,
    )
