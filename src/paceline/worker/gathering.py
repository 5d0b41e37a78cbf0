"""Gathers a value from every worker on all workers, for `worker.sum` and `worker.mean`."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from paceline.errors import RunStopped, UsageError, WorkerLostError, name_workers
from paceline.membership.common_calls import CommonCalls
from paceline.optim.half_types import sum_type
from paceline.system.plain_tensors import tensors_from_bytes, tensors_to_bytes
from paceline.transport.message_collectives import MessageCollectives
from paceline.transport.round_header import Purpose

if TYPE_CHECKING:
    from paceline.worker.supervised import WorkerState

_ARCHIVE = b"PK"  # the first bytes of a tensor; a number is JSON
_DEADLINE_S = 600.0
_LOOK_EVERY_S = 0.05
_LOOK_IN_STORE_EVERY_S = 0.005


class Call(NamedTuple):
    """The waiting call, and what the other workers must do: for the message that some did not come."""

    name: str
    remedy: str


_SUM = Call("worker.sum or worker.mean", "all workers must call it, so not under `if worker.worker_id == 0`.")


@dataclass(frozen=True)
class Contribution:
    """A worker's value for its call of that number, as bytes: multiprocessing would share a tensor's memory."""

    number: int
    value: bytes
    epoch: int  # that its loop has reached


@dataclass(frozen=True)
class Contributions:
    """The answer to a worker's call of that number: the participants' values, in the order of their ids."""

    number: int
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class Entered:
    """A dead worker's replacement has a batch, in this epoch: the others wait for its parts from now on."""

    epoch: int


@dataclass(frozen=True)
class Left:
    """The worker's loop has ended: the others no longer wait for its parts."""


class Gatherer(Protocol):
    """A worker's side."""

    def gather(self, value: Any, call: Call = _SUM) -> list[Any]:
        """The values (numbers or tensors) of all workers that are still in their loops, in the order of their ids.

        Raises:
            RunStopped: the run is being stopped.
            WorkerLostError: a worker did not arrive within the deadline.
        """
        ...

    def leave(self) -> None:
        """Says that this worker gathers no more."""


class Gathering:
    """The supervisor's side: answers once all running workers have sent their parts."""

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self._workers = workers
        self._calls = CommonCalls(range(len(workers)))
        self._incarnations = [0] * len(workers)
        self._num_answered = Counter[tuple[int, int]]()  # by worker and incarnation

    def num_answered(self, worker: WorkerState) -> int:
        """How many values of a worker's process the others have got."""
        return self._num_answered[worker.worker_id, worker.incarnation]

    def hear(self, worker: WorkerState, message: Contribution | Entered | Left) -> None:
        self._note_replacement(worker)
        match message:
            case Contribution(epoch=epoch):
                self._calls.bring(worker.worker_id, epoch, message)
            case Entered(epoch=epoch):
                self._calls.enter(worker.worker_id, epoch)
            case Left():
                self._calls.leave(worker.worker_id)

    def _note_replacement(self, worker: WorkerState) -> None:
        if worker.incarnation > self._incarnations[worker.worker_id]:
            self._incarnations[worker.worker_id] = worker.incarnation
            self._calls.replace(worker.worker_id)

    def settle(self) -> None:
        """Answers if no part is missing; call it after every message."""
        for one in self._workers:
            self._note_replacement(one)
            if not one.running:
                self._calls.leave(one.worker_id)
        while parts := self._calls.take():
            values = tuple(part.value for _, part in sorted(parts.items()))
            for worker_id, part in parts.items():
                one = self._workers[worker_id]
                self._num_answered[worker_id, one.incarnation] += worker_id in self._calls.members
                with contextlib.suppress(OSError):  # it is gone: its end is the next news
                    one.connection.send(Contributions(part.number, values))


@dataclass(eq=False)
class SupervisedGatherer:
    """Gathers through the supervisor, which waits for all values and sends them to every worker."""

    connection: Any  # to the supervisor
    stopped: Callable[[], bool]  # whether the run is being stopped
    deadline_s: float = _DEADLINE_S  # how long to wait for the others
    epoch: int = field(default=0, init=False)  # that the worker's loop has reached
    _number: int = field(default=0, init=False)

    def gather(self, value: Any, call: Call = _SUM) -> list[Any]:
        self._number += 1
        self.connection.send(Contribution(self._number, _packed(value), self.epoch))
        until_s = time.monotonic() + self.deadline_s
        while time.monotonic() < until_s:
            if self.connection.poll(_LOOK_EVERY_S):
                answer = self.connection.recv()
                if isinstance(answer, Contributions) and answer.number == self._number:
                    return [_unpacked(one) for one in answer.values]
            elif self.stopped():
                raise RunStopped("the run was stopped")
        raise _nobody_came(call, "some workers", self.deadline_s)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(Left())


@dataclass(eq=False)
class StoreGatherer:
    """Gathers through the store of workers that another launcher started."""

    store: Any
    worker_id: int
    num_workers: int
    deadline_s: float  # how long to wait for the others
    on_wait: Callable[[], object] = lambda: None  # called during each wait; an error that it raises ends the wait
    _number: int = field(default=0, init=False)

    def gather(self, value: Any, call: Call = _SUM) -> list[Any]:
        """As in `Gatherer`; costs a trip to the store for each worker, and sends the values as text."""
        self._number += 1
        self.store.set(self._key(self.worker_id), _packed(value).hex())
        missing, gone = list(range(self.num_workers)), set[int]()
        until_s = time.monotonic() + self.deadline_s
        while missing:
            self.on_wait()
            gone |= {one for one in missing if self.store.check([f"left sums/{one}"])}
            missing = [one for one in missing if not self.store.check([self._key(one)])]
            if all(one in gone for one in missing):  # the missing ones left before this worker looked for their parts
                break
            if time.monotonic() > until_s:
                raise _nobody_came(call, name_workers([one for one in missing if one not in gone]), self.deadline_s)
            time.sleep(_LOOK_IN_STORE_EVERY_S)
        here = [one for one in range(self.num_workers) if one not in missing]
        values = [_unpacked(bytes.fromhex(self.store.get(self._key(one)).decode())) for one in here]
        if self._number > 1:  # all have come this far, and so have read the values of the last call
            self.store.delete_key(self._key(self.worker_id, self._number - 1))
        return values

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store's holder has already left
            self.store.set(f"left sums/{self.worker_id}", "1")

    def _key(self, worker_id: int, number: int | None = None) -> str:
        return f"sum/{self._number if number is None else number}/{worker_id}"


@dataclass(eq=False)
class CollectiveGatherer:
    """Gathers by sums over all living workers: each adds the bytes of its value where the others have zeros."""

    collectives: MessageCollectives
    worker_id: int
    num_workers: int
    stopped: Callable[[], bool]  # whether this worker has been told to end; the others then go on without it
    waits: Callable[[], bool]  # whether it is a newcomer that the others have not let in yet

    def gather(self, value: Any, call: Call = _SUM) -> list[Any]:
        """As in `Gatherer`; costs two sums."""
        if self.stopped():
            self.collectives.leave()
        if self.stopped() or self.waits():
            return [value]
        self.collectives.purpose = Purpose.SUM
        own = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.num_workers, dtype=torch.int64)
        sizes[self.worker_id] = len(own)
        self.collectives.add_up(sizes)
        table = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
        if sizes[self.worker_id]:
            table.split(sizes.tolist())[self.worker_id].copy_(own)
        self.collectives.add_up(table)
        self.collectives.purpose = Purpose.STEP
        values = table.split(sizes.tolist())
        return [_unpacked(bytes(values[one].tolist())) for one in self.collectives.members if sizes[one]]

    def leave(self) -> None:
        """As in `Gatherer`: the others hear of it from the collectives."""


class NoGatherer:
    """Gathers for a lone worker."""

    def gather(self, value: Any, call: Call = _SUM) -> list[Any]:
        return [value]

    def leave(self) -> None:
        """As in `Gatherer`."""


def total_of(values: list[Any]) -> Any:
    """The sum of the values in their order, computed in float32 for half types.

    Raises:
        UsageError: tensors of different shapes, or tensors and numbers.
    """
    shapes = {tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in values}
    if len(shapes) > 1:
        words = " and ".join(sorted("a number" if one is None else str(one) for one in shapes))
        raise UsageError(f"worker.sum and worker.mean were given different shapes by different workers: {words}.")
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return sum(values)
    total = first.to(sum_type(first.dtype) if first.is_floating_point() else torch.int64, copy=True)
    for one in values[1:]:
        total += one
    return total.to(first.dtype) if first.is_floating_point() else total


def _packed(value: Any) -> bytes:
    """Encodes a value without pickle, since strangers may write to a store that asks for no key."""
    if isinstance(value, torch.Tensor):
        return bytes(tensors_to_bytes({"value": value}))
    number = value.item() if hasattr(value, "item") else value  # NumPy's numbers have one
    if not isinstance(number, (int, float)):
        raise UsageError(f"worker.sum and worker.mean take a number or a tensor, not {type(value).__name__}.")
    return json.dumps(number).encode()


def _unpacked(data: bytes) -> Any:
    try:
        value = tensors_from_bytes(data)["value"] if data.startswith(_ARCHIVE) else json.loads(data)
        if not isinstance(value, (int, float, torch.Tensor)):
            raise ValueError(type(value).__name__)
    except (ValueError, KeyError, RecursionError) as error:
        raise UsageError(
            "A worker's value for worker.sum or worker.mean cannot be read, because something else writes to this "
            "run's store; start the run at another address."
        ) from error
    return value


def _nobody_came(call: Call, who: str, deadline_s: float) -> WorkerLostError:
    return WorkerLostError(f"{call.name} waited {deadline_s:g} s for {who}: {call.remedy}")
