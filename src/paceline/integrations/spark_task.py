"""A Spark task during training: it reads its partition once, then computes updates and pushes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.algorithms.downpour import Downpour
from paceline.algorithms.server.client import Client
from paceline.errors import PeerLostError, UsageError, WorkerLostError
from paceline.integrations.spark_failures import make_good, said, tell
from paceline.integrations.spark_job import meet_driver
from paceline.integrations.spark_rows import SpilledRows, spilled
from paceline.membership.join_point import JoinPoint, JoinPointLostError
from paceline.membership.peers import Peers
from paceline.optim.flat import FlatBinding
from paceline.optim.settings import OptimizerSettings, settings_of
from paceline.ports.ports import Message, Ports
from paceline.system.clock import RealClock
from paceline.transport.directory import read_peer
from paceline.transport.keys import Keys
from paceline.worker.memberships.memory import own_arena

Gradient = Callable[[nn.Module, dict[str, Any]], Any]
Descent = Callable[[nn.Module, dict[str, Tensor]], Any]


class NamedUpdates:
    """Updates by parameter name, and as flat vectors (P,)."""

    def __init__(self, model: nn.Module) -> None:
        self.binding = FlatBinding(model.parameters())
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's (P,) parts as views by name; costs memory for each vector that it is called with."""
        return dict(zip(self.names, self.binding.views(vector), strict=True))

    def write(self, update: Any, vector: Tensor) -> bool:
        """Writes the update that `gradient` returned into `vector` (P,), zero elsewhere; False: it returned None.

        Raises:
            UsageError: the update does not match this model's parameters.
        """
        if update is None or (isinstance(update, Mapping | Sequence) and not len(update)):
            return False
        if isinstance(update, Mapping):
            values = dict(update)
        elif isinstance(update, Sequence) and not isinstance(update, str):
            if len(update) != len(self.names):
                raise UsageError(f"gradient returned {len(update)} arrays for a model of {len(self.names)} parameters")
            values = dict(zip(self.names, update, strict=True))
        else:
            raise UsageError(
                f"gradient returned {type(update).__name__}: return a dict of arrays by parameter name, a list with "
                "one array for each parameter in order, or None"
            )
        vector.zero_()
        views = self.named(vector)
        for name, value in values.items():
            if name not in views:
                raise UsageError(f"gradient returned {name!r}, but the model's parameters are {', '.join(self.names)}")
            array = torch.as_tensor(value)
            if array.shape != views[name].shape:
                found, expected = tuple(array.shape), tuple(views[name].shape)
                raise UsageError(f"gradient returned {name!r} of shape {found}, but the parameter has {expected}")
            views[name].copy_(array)
        return True


@dataclass(frozen=True)
class PartitionTask:
    """A task, as data that Spark sends to its executors; the only message that contains the key."""

    address: str
    keys: Keys
    model: nn.Module
    gradient: Gradient
    descent: Descent
    algorithm: Downpour
    num_members: int  # members at the servers: one for each partition, and the driver's, which never joins
    epochs: int
    batch_size: int
    seed: int
    deadline_s: float

    def run(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """Trains on this partition; returns the outcome for the driver."""
        from pyspark import TaskContext  # pyright: ignore[reportMissingImports]

        context: Any = TaskContext.get()
        torch.set_num_threads(max(1, context.cpus()))
        partition, attempt = context.partitionId(), context.taskAttemptId()
        with spilled(batches) as file:
            rows = SpilledRows(file.fileno())
        with contextlib.closing(
            meet_driver("DeepDist", self.address, self.keys, self.deadline_s, partition)
        ) as join_point:
            try:
                told = self._train(join_point, partition, attempt, rows)
            except (Exception, SystemExit) as error:
                raise self._failure(join_point, partition, attempt, error) from error
            make_good(join_point, partition)
        return [{"partition": partition, "attempt": context.attemptNumber(), "rows": len(rows), **told}]

    def _train(self, join_point: JoinPoint, partition: int, attempt: int, rows: SpilledRows) -> dict[str, int]:
        updates = NamedUpdates(self.model)
        arena = own_arena(updates.binding, self.algorithm, num_workers=self.num_members, worker_id=partition)
        arena.shared.is_elsewhere = True
        ports: Ports[Any] = arena.ports(RealClock(), self.seed)
        peers = Peers(
            join_point,
            partition,
            self.num_members,
            ports.counts,
            lambda: False,
            incarnation=attempt,
            num_servers=ports.num_servers,
            host=join_point.host,
            key=join_point.key,
        )
        try:
            ports = replace(ports, mailbox=peers.mailbox, incarnation=attempt)
            assert ports.mailbox is not None
            try:
                # Says nothing, but fails if the way back is closed: a server that is far would be waited for.
                ports.mailbox.send(self.num_members, Message("here"))
            except PeerLostError as error:
                raise WorkerLostError(
                    f"The task of partition {partition} reaches the driver, but the driver cannot reach its executor "
                    f"at {join_point.host or 'a local socket'}: open the way back, or run the driver in the cluster."
                ) from error
            client = Client(ports, self.algorithm.codec)
            client.join()
            client.tell(_settings(updates.binding))
            try:
                return {
                    **_Steps(self, updates, client, rows, partition, join_point).run(),
                    "sent_bytes": ports.counts.sent_bytes,
                }
            finally:
                client.leave()
        finally:
            peers.close()
            updates.binding.release()
            arena.segment.close()

    def _failure(self, join_point: JoinPoint, partition: int, attempt: int, error: BaseException) -> BaseException:
        """The error by which the task fails; tells the driver about the first one, unless a newer attempt exists."""
        with contextlib.suppress(JoinPointLostError):
            holder = read_peer(join_point.get(f"peer/{partition}")) if join_point.check([f"peer/{partition}"]) else None
            if holder is not None and holder[0] > attempt:
                return WorkerLostError(f"A newer attempt has taken over partition {partition}: this one ends.")
            tell(join_point, partition, said(partition, error))
        return error


class _Steps:
    """A partition's steps, from the first whose update the server does not have.

    Update k covers the steps (k - 1) push to k push in every attempt, so updates that a dead attempt pushed are not repeated.
    """

    def __init__(
        self,
        task: PartitionTask,
        updates: NamedUpdates,
        client: Client,
        rows: SpilledRows,
        partition: int,
        join_point: JoinPoint,
    ) -> None:
        self._task, self._updates, self._client, self._rows, self._partition = task, updates, client, rows, partition
        self._per_epoch = -(-len(rows) // task.batch_size)
        self._total = task.epochs * self._per_epoch
        self._order = np.empty(0, dtype=np.int64)
        self._epoch = -1
        join_point.set(f"steps/{partition}", str(self._total))

    def run(self) -> dict[str, int]:
        task, client = self._task, self._client
        push, fetch = task.algorithm.push, task.algorithm.fetch
        update, accrued = self._updates.binding.zeros(), self._updates.binding.zeros()
        self._updates.binding.bind(client.x)
        samples = skipped = 0
        first = min(self._total, client.sequence * push)
        for done in range(first, self._total):
            rows = self._next_rows(done)
            is_some = self._updates.write(self._gradient(self._rows.batch(rows)), update)
            with torch.no_grad():
                if is_some:
                    accrued.add_(update)
                    samples += len(rows)
                skipped += not is_some
                pushes, fetches = (done + 1) % push == 0 or done + 1 == self._total, (done + 1) % fetch == 0
                if is_some and not fetches:
                    task.descent(task.model, self._updates.named(update))
                if pushes and samples:
                    client.sequence = done // push  # `push` counts one further
                    client.push(accrued, samples, fetch=fetches)
                    accrued.zero_()
                    samples = 0
                elif fetches:
                    client.fetch()
        return {"first": first, "steps": self._total, "skipped": skipped}

    def _gradient(self, batch: dict[str, Any]) -> Any:
        for parameter in self._updates.binding.parameters:
            parameter.grad = None
        return self._task.gradient(self._task.model, batch)

    def _next_rows(self, step: int) -> np.ndarray:
        epoch, place = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self._task.seed, self._partition, epoch])
            self._epoch, self._order = epoch, generator.permutation(len(self._rows))
        size = self._task.batch_size
        return self._order[place * size : (place + 1) * size]


def _settings(binding: FlatBinding) -> OptimizerSettings:
    """The settings that servers need before a first update; unused, as the user's descent applies updates."""
    own = dict(zip(map(id, binding.parameters), binding.ranges, strict=True))
    return settings_of(torch.optim.SGD(binding.parameters, lr=1.0), lambda parameter: own.get(id(parameter)))
