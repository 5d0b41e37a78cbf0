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
    """The models that averages take: each is kept until all workers that took it in the run have taken it.

    Costs: a vector for each model that is still to be taken.
    """

    def __init__(self, scheduler: Scheduler, orders: Mapping[Process, np.ndarray]) -> None:
        self._scheduler = scheduler
        self.halves = {
            process: deque(
                _Half(version, ((peer, peer_incarnation), at), None if of == NONE else (process, of))
                for version, at, of, peer, _, peer_incarnation in rows.tolist()
            )
            for process, rows in orders.items()
        }
        every = [one for halves in self.halves.values() for one in halves]
        self._uses = Counter(state for one in every for state in (one.theirs, one.own) if state is not None)
        self._kept: dict[State, torch.Tensor] = {}
        self._waiting: dict[State, list[Program]] = {}

    def keep(self, state: State, x: torch.Tensor) -> None:
        if self._uses[state]:
            self._kept[state] = x.clone()
            for program in self._waiting.pop(state, ()):
                self._scheduler.wake(program)

    def take(self, state: State) -> torch.Tensor:
        while state not in self._kept:
            self._waiting.setdefault(state, []).append(self._scheduler.current)
            (worker, _), version = state
            self._scheduler.wait(f"version {version} of worker {worker}")
        self._uses[state] -= 1
        return self._kept[state] if self._uses[state] else self._kept.pop(state)


class AverageOrder(StepOrder):
    """Averages a worker's own model, `shared`, where the run did, after it has called `on_applied` for an update."""

    def __init__(self, averages: Averages, process: Process, shared: Any, on_applied: Callable[[int], None]) -> None:
        super().__init__(on_applied)
        self._averages, self.process, self.shared = averages, process, shared
        self._halves = averages.halves[process]

    def begin(self) -> None:
        if not self._halves or self._halves[0].own is not None:  # else it copies another's model first
            self.reached()

    def read(self, row: Any) -> None:
        self._until(row["read_version"])

    def computed(self, row: Any) -> None:
        self._until(row["applied_version"] - 1)

    def recorded(self, version: int, row: Any) -> None:
        self.reached()
        super().recorded(version, row)

    def end(self) -> None:
        self._until(float("inf"))

    def reached(self) -> None:
        """The worker's model has a new version."""
        self._averages.keep((self.process, self.shared.version), self.shared.x)

    def _until(self, version: float) -> None:
        """Makes the worker's averages up to this version of its model."""
        while self._halves and self._halves[0].version <= version:
            half = self._halves.popleft()
            there = self._averages.take(half.theirs)
            if half.own is None:
                self.shared.x.copy_(there)
                self.shared.version = half.version
            else:
                move(self.shared.x, there, self._averages.take(half.own))
                self.shared.advance(updates=0)
            self.reached()


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
