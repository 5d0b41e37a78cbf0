"""Runs simulated workers in the order that a real run has recorded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.plan import BatchPlan
from paceline.data.sources import END
from paceline.errors import PacelineError
from paceline.loop.base_replica import BaseReplica
from paceline.loop.task_replica import TaskReplica
from paceline.ports.replica import OnBucket, OnEnd
from paceline.records.accruals import ACCRUED
from paceline.records.order import ORDER_DTYPE, OrderWriter
from paceline.run.unrecorded import UNKNOWN
from paceline.simulator.program import Program
from paceline.simulator.replica import SimulatedReplica
from paceline.simulator.scheduler import Scheduler

COMPARED: tuple[str, ...] = ("step", "batch", "samples", "read_version", "applied_version", "loss")
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
    recorded: dict[str, Any] = {name: row[name].item() for name in COMPARED}
    replayed: dict[str, Any] = dict(zip(COMPARED, values, strict=True))
    if recorded["samples"] == UNKNOWN:
        recorded |= {name: replayed[name] for name in COMPARED if name not in _KNOWN}
    if not all(_equal(recorded[name], replayed[name]) for name in COMPARED):
        raise _mismatch(worker_id, recorded, replayed)


def _mismatch(worker_id: int, recorded: dict[str, Any], replayed: dict[str, Any]) -> ReplayMismatchError:
    version, step = recorded["applied_version"], recorded["step"]
    differ = [name for name in recorded if not _equal(recorded[name], replayed[name])]
    values = ", ".join(f"{name.replace('_', ' ')} {recorded[name]!r} then, {replayed[name]!r} now" for name in differ)
    what = f"the gradient of update {version}, " if version > 0 else ""
    return ReplayMismatchError(
        f"The replay differs from the run at {what}step {step} of worker {worker_id}: {values}.", version, worker_id
    )


def _equal(a: float, b: float) -> bool:
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def first_step(rows: np.ndarray) -> int:
    """The number of a process's first step: where replacements come into rounds, their steps go on with the others'."""
    return int(rows["step"][0]) if len(rows) else 1


class Turns:
    """Lets reads and updates happen in the order of their versions.

    Version v is read after update v and before update v + 1; reads of one version may happen in any order. A stage is 2 v
    for what happens at version v, and 2 v - 1 for update v.
    """

    def __init__(self, scheduler: Scheduler, on_update: Callable[[int], None]) -> None:
        self._scheduler, self._on_update = scheduler, on_update
        self._pending: Counter[int] = Counter()  # stage -> what has not happened yet
        self._stages: list[int] = []  # of these, the lowest last
        self._waiting: list[tuple[int, Program]] = []

    def expect(self, rows: np.ndarray, *, retries: bool) -> None:
        """Adds what the steps of one worker's process will do.

        Args:
            rows: their records.
            retries: whether failed updates read the parameters a second time, as with `leashed`.
        """
        applied = rows["applied_version"]
        self._pending.update((2 * rows["read_version"]).tolist())
        self._pending.update((2 * rows["gradient_version"][applied < 0]).tolist())
        if retries:
            self._pending.update((2 * rows["gradient_version"][rows["failed_publishes"] > 0]).tolist())
        self._pending |= Counter(dict.fromkeys((2 * applied[applied > 0] - 1).tolist(), 1))

    def begin(self) -> None:
        """Call it when all workers' steps are known."""
        self._stages = sorted(self._pending, reverse=True)

    def wait_for(self, stage: int) -> None:
        """Waits until nothing that comes before this stage is left to happen."""
        if self._stages and self._stages[-1] < stage:
            self._waiting.append((stage, self._scheduler.current))
            self._scheduler.wait(f"version {stage // 2}")

    def happened(self, stage: int) -> None:
        self._pending[stage] -= 1
        while self._stages and self._pending[self._stages[-1]] <= 0:
            self._stages.pop()
        first = self._stages[-1] if self._stages else math.inf
        for waiting in [one for one in self._waiting if one[0] <= first]:
            self._waiting.remove(waiting)
            self._scheduler.wake(waiting[1])

    def updated(self, version: int) -> None:
        """Update `version` has been made; it counts once if several workers say so."""
        if self._pending[2 * version - 1] > 0:
            self._on_update(version)
            self.happened(2 * version - 1)


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


class RepeatingReplica(BaseReplica, ABC):
    """The base of replicas that repeat recorded steps; comes before the class of a simulated replica.

    Args:
        on_applied: called with the version of each update in which this worker has a part; None: never.
    """

    def __init__(self, *args: Any, on_applied: Callable[[int], None] | None = None, **base: Any) -> None:
        super().__init__(*args, **base)
        self._on_applied = on_applied

    @property
    @abstractmethod
    def _row(self) -> Any:
        """The record of the present step; None: it has none."""

    def _computed(self) -> None:
        """The gradient is ready."""


class RecordedReplica(RepeatingReplica, SimulatedReplica):
    """A worker that repeats its recorded steps, and raises `ReplayMismatchError` at the first that differs.

    Args:
        rows: the records of the worker's process.
        keeps: the update whose gradients are kept, if this worker computes any for it.

    Attributes:
        kept: step -> that gradient (P,).
        compared: number of steps that were equal.
    """

    def __init__(self, *task: Any, rows: np.ndarray, keeps: int | None, **base: Any) -> None:
        super().__init__(*task, **base)
        self._recorded, self._keeps = rows, keeps
        self._first_step = first_step(rows)
        self.kept: dict[int, torch.Tensor] = {}
        self.compared = 0
        # As in the run, plain SGD steps with sparse gradients as backward makes them: it adds a row's one by one.
        self._takes_own = self._is_plain_sgd and bool(self.binding.tables)
        self._own: list[torch.Tensor | None] = []
        self._accrued: list[Any] = []  # rows of gradients that wait for their update

    @property
    def _row(self) -> Any:
        place = self.step - self._first_step
        return self._recorded[place] if place < len(self._recorded) else None

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        self._own.clear()
        super().gradient(at, version, ready, finish)

    def _compute(self, ready: OnBucket, finish: OnEnd) -> None:
        if self._in_own:
            self._own = [one.grad for one in self.binding.parameters]
        row = self._row
        if self._keeps is not None and row is not None and row["applied_version"] == self._keeps:
            self.kept[self.step] = self._dense() if self._in_own else self.g.clone()
        super()._compute(ready, finish)
        self._computed()

    def _dense(self) -> torch.Tensor:
        g = self.binding.zeros()
        for part, own in zip(self.binding.views(g), self._own, strict=True):
            if own is not None:
                part.copy_(own.to_dense())
        return g

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
        else:
            super().apply(to, scale, of, weight)

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        super()._record(applied_version, gradient_version, failed_publishes)
        if (row := self._row) is None:
            return
        if applied_version == ACCRUED:
            self._accrued.append(row)
            applied_version = row["applied_version"].item()
        else:
            self._settle(applied_version)
        samples = self.samples if applied_version else 0
        self._compare(row, (self.step, self.batch, samples, self._read_version, applied_version, self.loss))
        self.compared += 1
        if self._on_applied is not None:
            self._on_applied(applied_version)

    def settled(self, version: int) -> None:
        super().settled(version)
        self._settle(version)

    def _settle(self, version: int) -> None:
        """The gradients that wait have become this update, or were dropped."""
        for row in self._accrued:
            self._compare(row, [version if name == "applied_version" else row[name].item() for name in COMPARED])
        self._accrued.clear()

    def _compare(self, row: Any, values: Sequence[float]) -> None:
        compare_step(self._core.worker_id, row, values)


class OrderCheck:
    """Compares what is decided in a replay with the record; implements `Ports.decided`.

    Args:
        process: the worker and its incarnation.
        rows: of its order.
    """

    def __init__(self, process: tuple[int, int], rows: np.ndarray) -> None:
        self._worker_id, self._rows = process[0], iter(rows.tolist())
        self._writer = OrderWriter(self._check, process[1])

    def __call__(self, *numbers: int, **named: int) -> None:
        self._writer(*numbers, **named)

    def _check(self, *replayed: int) -> None:
        recorded = next(self._rows, None)
        if recorded is not None and recorded != replayed:
            differ = [
                f"{name} {then} then, {now} now"
                for name, then, now in zip(ORDER_DTYPE.names or (), recorded, replayed, strict=True)
                if then != now
            ]
            raise ReplayMismatchError(
                f"The replay differs from the run at exchange {recorded[0]} of worker {self._worker_id}: {', '.join(differ)}.",
                recorded[2],
                self._worker_id,
            )


class TakesTurns(RepeatingReplica):
    """Lets reads and updates take their turns; comes before the class of a replica.

    Args:
        turns: of all workers.
    """

    def __init__(self, *args: Any, turns: Turns, **named: Any) -> None:
        super().__init__(*args, **named)
        self._turns = turns

    def steps(self) -> Iterator[int]:
        for step in super().steps():  # type: ignore[misc]
            if self._row is not None:  # else the loop has begun a step that it may not make
                self._turns.wait_for(2 * self._row["read_version"])
            yield step

    def _computed(self) -> None:
        row = self._row
        self._turns.happened(2 * row["read_version"])
        if self._is_late or row["applied_version"] < 0:
            self._turns.wait_for(2 * row["gradient_version"])
        else:
            self._turns.wait_for(2 * row["applied_version"] - 1)

    @property
    def _is_late(self) -> bool:
        """Whether another worker publishes first, so that this one updates a second time."""
        return self._row["failed_publishes"] > 0

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        super().apply(to, scale, of, weight)  # type: ignore[misc]
        if self._is_late:
            self._turns.happened(2 * self._row["gradient_version"])
            self._turns.wait_for(2 * self._row["applied_version"] - 1)

    def dropped(self, gradient_version: int, failed_publishes: int = 0) -> None:
        super().dropped(gradient_version, failed_publishes)
        self._turns.happened(2 * self._row["gradient_version"])


class OrderedReplica(TakesTurns, RecordedReplica):
    """A task's replica that takes turns."""
