"""Repeats the recorded averages of workers that have their own models, each at its place between their updates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.algorithms.exchange import move
from paceline.records.order import NONE, Process
from paceline.run.recorded_order import StepOrder
from paceline.simulator.program import Program
from paceline.simulator.scheduler import Scheduler

State = tuple[Process, int]  # a worker's model at one version


class _Half(NamedTuple):
    """One worker's half of an average, or a copy of another worker's model."""

    version: int  # that it makes
    theirs: State
    own: State | None  # None: it is a copy


class Averages:
    """The averages of all workers: each takes the models that it took in the run, and keeps those that others will take.

    Costs: a vector for each model that is still to be taken.

    Args:
        scheduler: of the workers' programs.
        orders: by worker and incarnation, the rows of its order.
    """

    def __init__(self, scheduler: Scheduler, orders: Mapping[Process, np.ndarray]) -> None:
        self._scheduler = scheduler
        self._halves = {
            process: deque(
                _Half(version, ((peer, peer_incarnation), at), None if of == NONE else (process, of))
                for version, at, of, peer, _, peer_incarnation in rows.tolist()
            )
            for process, rows in orders.items()
        }
        every = [one for halves in self._halves.values() for one in halves]
        self._uses = Counter(state for one in every for state in (one.theirs, one.own) if state is not None)
        self._kept: dict[State, torch.Tensor] = {}
        self._waiting: dict[State, list[Program]] = {}

    def begin(self, process: Process, shared: Any) -> None:
        """A worker begins with its model; a replacement that copies another's first makes that version only then."""
        halves = self._halves[process]
        if not halves or halves[0].own is not None:
            self.reached(process, shared)

    def reached(self, process: Process, shared: Any) -> None:
        """A worker's model has a new version."""
        state = process, shared.version
        if self._uses[state]:
            self._kept[state] = shared.x.clone()
            for program in self._waiting.pop(state, ()):
                self._scheduler.wake(program)

    def until(self, process: Process, shared: Any, version: float) -> None:
        """Makes a worker's averages up to this version of its model."""
        halves = self._halves[process]
        while halves and halves[0].version <= version:
            half = halves.popleft()
            there = self._take(half.theirs)
            if half.own is None:
                shared.x.copy_(there)
                shared.version = half.version
            else:
                move(shared.x, there, self._take(half.own))
                shared.advance(updates=0)
            self.reached(process, shared)

    def _take(self, state: State) -> torch.Tensor:
        while state not in self._kept:
            self._waiting.setdefault(state, []).append(self._scheduler.current)
            (worker, _), version = state
            self._scheduler.wait(f"version {version} of worker {worker}")
        self._uses[state] -= 1
        return self._kept[state] if self._uses[state] else self._kept.pop(state)


class AverageOrder(StepOrder):
    """Averages a worker's own model where the run did.

    Args:
        averages: of all workers.
        process: the worker and its incarnation.
        shared: the worker's model.
        on_applied: called with the version of each of the worker's updates, before it averages again.
    """

    def __init__(
        self, averages: Averages, process: Process, shared: Any, on_applied: Callable[[int], None]
    ) -> None:
        super().__init__(on_applied)
        self._averages, self._process, self._shared = averages, process, shared

    def begin(self) -> None:
        self._averages.begin(self._process, self._shared)

    def read(self, row: Any) -> None:
        self._until(row["read_version"])

    def computed(self, row: Any) -> None:
        self._until(row["applied_version"] - 1)

    def recorded(self, version: int, row: Any) -> None:
        self._averages.reached(self._process, self._shared)
        super().recorded(version, row)

    def end(self) -> None:
        self._until(float("inf"))

    def _until(self, version: float) -> None:
        self._averages.until(self._process, self._shared, version)


class Silence:
    """A mailbox and concurrency for programs whose messages are not exchanged again."""

    def send(self, to: int, message: Any) -> None:
        pass

    def receive(self, timeout_s: float | None = None, **which: Any) -> None:
        pass

    def peers(self) -> frozenset[int]:
        return frozenset()

    def serve(self, *program: Any) -> Silence:
        return self

    def lock(self) -> nullcontext[None]:
        return nullcontext()

    def failed(self) -> bool:
        return False

    def join(self) -> None:
        pass
