"""The server of a training on Spark: applies updates by the user's `descent`, and counts them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.algorithms.downpour import Downpour
from paceline.algorithms.server.admission import Admission
from paceline.algorithms.server.apply import Applier, ApplyRule
from paceline.algorithms.server.served import Served, ShardRules
from paceline.algorithms.server.shard import Shard
from paceline.algorithms.server.update import UpdateInfo
from paceline.errors import PacelineError, first_line
from paceline.integrations.spark_task import Descent, NamedUpdates
from paceline.membership.join_point import JoinPoint, JoinPointLostError
from paceline.observe.progress import Progress, WorkerProgress
from paceline.ports.ports import Counts, ServerPorts

_BETWEEN_PROGRESS_S = 0.25


class Ledger(Admission):
    """Admits every update in the order of arrival; tells a new attempt at a partition the number of its last update."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}  # partition -> number of its last update
        self.updates = self.samples = self.staleness = 0

    def applied(self, update: UpdateInfo) -> None:
        self.last[update.worker_id] = update.sequence
        self.updates += 1
        self.samples += update.num_samples
        self.staleness += update.staleness

    def clock(self, worker_id: int) -> int:
        return self.last.get(worker_id, 0)


class Master:
    """The model at the driver, and its server."""

    def __init__(
        self,
        model: nn.Module,
        descent: Descent,
        algorithm: Downpour,
        join_point: JoinPoint,
        on_progress: Callable[[Progress], object] | None,
    ) -> None:
        self.ledger = Ledger()  # the updates applied so far
        self.counts = Counts()  # of the server's messages, once it serves
        self.updates = NamedUpdates(model)
        self._model, self._descent = model, descent
        self._push = algorithm.push
        self._join_point = join_point
        self._on_progress = on_progress
        self._totals: dict[int, int] = {}  # partition -> number of its steps
        self._begun_s = self._told_s = time.monotonic()
        rules = ShardRules(admission=lambda shard: self.ledger, apply=_ByDescent(master=self), codec=algorithm.codec)
        self.algorithm = _Serving(rules=rules, master=self)

    def bind(self, x: Tensor) -> None:
        """Makes the model's parameters views of the server's vector (P,)."""
        self.updates.binding.bind(x)
        self._update = self.updates.binding.zeros()
        self._named = self.updates.named(self._update)

    def apply(self, update: Tensor) -> None:
        """Applies an update (P,) by the user's descent; raises PacelineError if it failed."""
        self._update.copy_(update)
        try:
            self._descent(self._model, self._named)
        except (Exception, SystemExit) as error:
            raise PacelineError(f"descent failed: {type(error).__name__}: {first_line(error)}.") from error
        if self._on_progress is not None and time.monotonic() - self._told_s >= _BETWEEN_PROGRESS_S:
            self.tell()

    def tell(self) -> None:
        if self._on_progress is None:
            return
        self._told_s, ledger = time.monotonic(), self.ledger
        done = {partition: number * self._push for partition, number in ledger.last.items()}
        for partition in done.keys() - self._totals.keys():
            with contextlib.suppress(JoinPointLostError, ValueError):
                self._totals[partition] = int(self._join_point.get(f"steps/{partition}"))
        elapsed_s, total = self._told_s - self._begun_s, sum(self._totals.values())
        share = min(1.0, sum(done.values()) / total) if total else 0.0
        workers = tuple(
            WorkerProgress(one, steps=min(done[one], self._totals.get(one, done[one]))) for one in sorted(done)
        )
        progress = Progress(
            elapsed_s,
            share,
            elapsed_s * (1 - share) / share if share else None,
            version=ledger.updates,
            samples=ledger.samples,
            samples_per_s=ledger.samples / elapsed_s if elapsed_s else 0.0,
            workers=workers,
        )
        self._on_progress(progress)


@dataclass(frozen=True, kw_only=True)
class _Serving(Served):
    """The servers' side alone: the workers' side is in Spark's tasks."""

    rules: Any
    master: Any
    shards: int = 1

    def serve(self, shard_id: int, ports: ServerPorts) -> None:
        self.master.counts = ports.counts
        Shard(shard_id, self.rules, ports).run()


@dataclass(frozen=True, kw_only=True)
class _ByDescent(ApplyRule):
    master: Any

    def start(self, num_elements: int, dtype: torch.dtype) -> Applier:
        """The user's descent keeps all state in the model."""
        return Applier(lambda x, gradient, info, learning_rate: self.master.apply(gradient))
