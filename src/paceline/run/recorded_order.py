"""Runs simulated workers in the order that a real run has recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.plan import BatchPlan
from paceline.data.sources import END
from paceline.errors import PacelineError
from paceline.loop.task_replica import TaskReplica
from paceline.ports.replica import OnBucket, OnEnd
from paceline.records.accruals import ACCRUED
from paceline.records.order import ORDER_DTYPE, OrderWriter, Process
from paceline.records.step_record import RECORD_DTYPE, Recorder
from paceline.run.unrecorded import UNKNOWN
from paceline.simulator.program import Program
from paceline.simulator.replica import SimulatedReplica, Timed
from paceline.simulator.scheduler import Scheduler

COMPARED: tuple[str, ...] = ("step", "batch", "samples", "read_version", "applied_version", "loss")
_PLACES = [(RECORD_DTYPE.names or ()).index(name) for name in COMPARED]
_KNOWN = {"step", "batch", "read_version", "applied_version"}  # of a gradient without a record


class ReplayMismatchError(PacelineError):
    """A replay differs from its run.

    Attributes:
        version: the update whose gradient or parameters differ; -1: the gradient was dropped.
        worker_id: who computed it; None: the parameters differ although all steps are equal.
    """

    def __init__(self, message: str, version: int, worker_id: int | None = None) -> None:
        super().__init__(message)
        self.version, self.worker_id = version, worker_id


def compare_step(worker_id: int, row: Any, values: Sequence[float]) -> None:
    """Compares the values of a step (`COMPARED`) with its record; raises `ReplayMismatchError` if any differs."""
    recorded = {name: row[name].item() for name in COMPARED}
    names = [name for name in COMPARED if recorded["samples"] != UNKNOWN or name in _KNOWN]
    if said := _differences(names, recorded, dict(zip(COMPARED, values, strict=True))):
        version, step = recorded["applied_version"], recorded["step"]
        what = f"the gradient of update {version}, " if version > 0 else ""
        raise ReplayMismatchError(
            f"The replay differs from the run at {what}step {step} of worker {worker_id}: {said}.", version, worker_id
        )


def _differences(names: Iterable[str], then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    differ = [one for one in names if then[one] != now[one] and not (math.isnan(then[one]) and math.isnan(now[one]))]
    return ", ".join(f"{one.replace('_', ' ')} {then[one]!r} then, {now[one]!r} now" for one in differ)


def first_step(rows: np.ndarray) -> int:
    """The number of a process's first step: where replacements come into rounds, their steps go on with the others'."""
    return int(rows["step"][0]) if len(rows) else 1


class StepOrder:
    """When the steps of one worker read and update the parameters, among those of the others; here, at any time.

    Args:
        on_applied: called with the version of each update in which this worker has a part; None: never.
    """

    def __init__(self, on_applied: Callable[[int], None] | None = None) -> None:
        self._on_applied = on_applied

    def begin(self) -> None:
        """The worker's first step follows."""

    def read(self, row: Any) -> None:
        """The step with this record is about to read the parameters."""

    def computed(self, row: Any) -> None:
        """Its gradient is ready."""

    def applied(self, row: Any) -> None:
        """The optimizer has stepped."""

    def recorded(self, version: int, row: Any) -> None:
        """The step has made this version, or was dropped (-1); None: it has no record."""
        if self._on_applied is not None:
            self._on_applied(version)

    def end(self) -> None:
        """The worker makes no further step."""


class Turns(StepOrder):
    """Lets reads and updates of all workers happen in the order of their versions.

    Version v is read after update v and before update v + 1; reads of one version may happen in any order. A stage is 2 v
    for what happens at version v, and 2 v - 1 for update v.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processes: Iterable[np.ndarray],  # the records of each process of all workers
        on_applied: Callable[[int], None],
    ) -> None:
        super().__init__(on_applied)
        self._scheduler = scheduler
        self._pending: Counter[int] = Counter()  # stage -> what has not happened yet
        for rows in processes:
            applied = rows["applied_version"]
            self._pending.update((2 * rows["read_version"]).tolist())
            self._pending.update((2 * rows["gradient_version"][applied < 0]).tolist())
            # With `leashed`, failed updates read the parameters a second time.
            self._pending.update((2 * rows["gradient_version"][rows["failed_publishes"] > 0]).tolist())
            self._pending |= Counter(dict.fromkeys((2 * applied[applied > 0] - 1).tolist(), 1))
        self._stages = sorted(self._pending, reverse=True)  # that have not happened, the lowest last
        self._waiting: list[tuple[int, Program]] = []

    def _wait_for(self, stage: int) -> None:
        """Waits until nothing that comes before this stage is left to happen."""
        if self._stages and self._stages[-1] < stage:
            self._waiting.append((stage, self._scheduler.current))
            self._scheduler.wait(f"version {stage // 2}")

    def _happened(self, stage: int) -> None:
        self._pending[stage] -= 1
        while self._stages and self._pending[self._stages[-1]] <= 0:
            self._stages.pop()
        first = self._stages[-1] if self._stages else math.inf
        for waiting in [one for one in self._waiting if one[0] <= first]:
            self._waiting.remove(waiting)
            self._scheduler.wake(waiting[1])

    def read(self, row: Any) -> None:
        self._wait_for(2 * row["read_version"])

    def computed(self, row: Any) -> None:
        self._happened(2 * row["read_version"])
        if row["failed_publishes"] > 0 or row["applied_version"] < 0:
            self._wait_for(2 * row["gradient_version"])
        else:
            self._wait_for(2 * row["applied_version"] - 1)

    def applied(self, row: Any) -> None:
        if row["failed_publishes"] > 0:  # another worker publishes first, so that this one updates a second time
            self._happened(2 * row["gradient_version"])
            self._wait_for(2 * row["applied_version"] - 1)

    def recorded(self, version: int, row: Any) -> None:
        if version < 0 and row is not None:
            self._happened(2 * row["gradient_version"])
        elif self._pending[2 * version - 1] > 0:  # an update counts once if several workers make it
            super().recorded(version, row)
            self._happened(2 * version - 1)


class RecordedClaims:
    """The batches that one process of a worker trained on, in its order."""

    shares = deal = None

    def __init__(self, plan: BatchPlan, rows: np.ndarray) -> None:
        self.plan = plan
        self._numbers = iter(rows["batch"].tolist())

    def next(self) -> int:
        return next(self._numbers, END)

    def indices(self, number: int) -> torch.Tensor:
        return self.plan.indices(number)


class RepeatingReplica(Timed):
    """The base of replicas that repeat recorded steps; comes before the class of a simulated replica.

    As a `Recorder` it takes the worker's own records, and raises `ReplayMismatchError` at the first that differs.

    Args:
        rows: the records of the worker's process.
        keeps: the update whose gradients are kept, if this worker computes any for it.
        order: when its steps read and update the parameters.
        may_go_on: whether it may make steps that have no record.

    Attributes:
        kept: step -> its entry in `Update.steps`, with its gradient.
        compared: number of steps that were equal.
    """

    def __init__(
        self,
        *args: Any,
        rows: np.ndarray,
        keeps: int | None,
        order: StepOrder,
        recorder: Recorder,
        may_go_on: bool = True,
        **base: Any,
    ) -> None:
        self._recorded, self._keeps, self.order, self._may_go_on = rows, keeps, order, may_go_on
        self._first_step = first_step(rows)
        self._write = recorder.append
        self.kept: dict[int, dict[str, Any]] = {}
        self.compared = 0
        super().__init__(*args, recorder=self, **base)

    @property
    def next_row(self) -> Any:
        """The record of the first step that was not compared; None: all were."""
        return self._recorded[self.compared] if self.compared < len(self._recorded) else None

    @property
    def _row(self) -> Any:
        """The record of the present step; None: it has none."""
        place = self.step - self._first_step
        return self._recorded[place] if place < len(self._recorded) else None

    def steps(self) -> Iterator[int]:
        self.order.begin()
        for step in super().steps():  # type: ignore[misc]
            if self._row is not None:  # else the loop has begun a step that it may not make
                self.order.read(self._row)
            yield step
        self.order.end()

    def _keep(self) -> None:
        """Keeps the gradient that `backward` has left in the parameters, if it is one to keep."""
        row = self._row
        if self._keeps is None or row is None or row["applied_version"] != self._keeps:
            return
        g = self.binding.zeros()
        self.kept[self.step] = {
            "worker": self._core.worker_id,
            **{name: row[name].item() for name in ("step", "batch", "read_version", "loss")},
            "staleness": int(row["applied_version"] - row["read_version"]) - 1,
            "samples": self._samples(),
            "gradient": g,
        }
        for part, parameter in zip(self.binding.views(g), self.binding.parameters, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.to_dense())

    def _samples(self) -> torch.Tensor | None:
        """Indices of the batch's samples in the training set; None: they are not known."""
        raise NotImplementedError

    def _computed(self) -> None:
        if self._row is not None:
            self.order.computed(self._row)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        super().apply(to, scale, of, weight)  # type: ignore[misc]
        self._optimizer_stepped()

    def _optimizer_stepped(self) -> None:
        if self._row is not None:
            self.order.applied(self._row)

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        super()._record(applied_version, gradient_version, failed_publishes)
        if applied_version != ACCRUED:
            self.order.recorded(applied_version, self._row)

    def append(self, *fields: float) -> None:
        """Takes one record and compares it: a loop may report a loss after its step."""
        if self._core.scheduler.has_ended:  # the step lacks the loss that the loop would still have reported
            return
        self._write(*fields)
        if (row := self.next_row) is not None:
            compare_step(self._core.worker_id, row, [fields[place] for place in _PLACES])
            self.compared += 1
        elif not self._may_go_on:
            raise self._one_more()

    def _one_more(self) -> ReplayMismatchError:
        worker_id, steps = self._core.worker_id, len(self._recorded)
        return ReplayMismatchError(
            f"The replay differs from the run: worker {worker_id} goes on after step {steps}, its last one in the run.",
            -1,
            worker_id,
        )


class RecordedReplica(RepeatingReplica, SimulatedReplica):
    """A task's worker that repeats its recorded steps."""

    def __init__(self, *task: Any, plan: BatchPlan, **base: Any) -> None:
        super().__init__(*task, **base)
        self._plan = plan
        # As in the run, plain SGD steps with sparse gradients as backward makes them: it adds a row's one by one.
        self._takes_own = self._is_plain_sgd and bool(self.binding.tables)
        self._own: list[torch.Tensor | None] = []

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        self._own.clear()
        super().gradient(at, version, ready, finish)

    def _compute(self, ready: OnBucket, finish: OnEnd) -> None:
        if self._in_own:
            self._own = [one.grad for one in self.binding.parameters]
        self._keep()
        super()._compute(ready, finish)
        self._computed()

    def _samples(self) -> torch.Tensor | None:
        return self._plan.indices(self.batch) if self.batch >= 0 else None  # in a round without a batch for this worker

    @property
    def g(self) -> torch.Tensor:
        self._bind_own()
        return super().g

    def _bind_own(self) -> None:
        """Other workers have computed with the same model since."""
        if self._in_own and self._own:
            for parameter, own in zip(self.binding.parameters, self._own, strict=True):
                parameter.grad = own

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        if self._in_own and not self._takes_rows:
            self._bind_own()
            TaskReplica.apply(self, to, scale, of, weight)
            self._optimizer_stepped()
        else:
            super().apply(to, scale, of, weight)


def order_check(process: Process, rows: np.ndarray) -> OrderWriter:
    """Compares what is decided in a replay with the rows of a process's order; implements `Ports.decided`."""
    (worker_id, incarnation), left, names = process, iter(rows.tolist()), ORDER_DTYPE.names or ()

    def check(*replayed: int) -> None:
        recorded = dict(zip(names, next(left, replayed), strict=True))
        if said := _differences(names, recorded, dict(zip(names, replayed, strict=True))):
            raise ReplayMismatchError(
                f"The replay differs from the run at exchange {recorded['moment']} of worker {worker_id}: {said}.",
                recorded["of"],
                worker_id,
            )

    return OrderWriter(check, incarnation)
