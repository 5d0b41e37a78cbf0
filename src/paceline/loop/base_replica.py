"""The worker's side of a step: its model and optimizer on flat vectors, its clock, and the step's record.

Two replicas share the bookkeeping. `TaskReplica`, in `loop/task_replica.py`, owns its loop, for `paceline train`.
`AttachedReplica`, in `loop/replica.py`, lets the user's loop run where the program asks for a gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.data.round_deal import RoundDeal
from paceline.loop.run_progress import RunProgress
from paceline.loop.slowness import Slowness
from paceline.optim.flat import FlatBinding
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Table
from paceline.ports.lookups import Lookups
from paceline.ports.ports import Counts
from paceline.ports.round_shares import RoundShares
from paceline.ports.shared import BUCKET_BYTES
from paceline.records.accruals import ACCRUED, Accruals
from paceline.records.step_record import Recorder

_UPDATE_TIME_SMOOTHING = 0.1
_NO_GRADIENT = 0  # as a record's applied version
_NO_COUNTS = (0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)  # of a worker that communicates nothing


class BaseReplica:
    """The base of all replicas: flat vectors, times, and the record of the step."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        *,
        binding: FlatBinding,
        recorder: Recorder | None,  # takes one record per step; None: no records
        waits: list[Any],  # objects whose `waited_s` counts time that the worker waited (clock, lock, barrier)
        staleness: Any,  # counts of all workers, updated at every update; None: not counted
        stopped: Callable[[], bool],  # whether the run is being stopped
        incarnation: int = 0,  # 0 for the worker's first process
        counts: Counts | None = None,  # of the worker's communication; None: it does not communicate
        now_s: Callable[[], float] = time.monotonic,  # the clock of the records; virtual in a simulation
        slow: float = 1.0,  # injected slowdown: the factor on the time of gradients
        rounds: Any = None,  # its `num_ended` counts the steps that are over; None: not counted
        bucket_bytes: int = BUCKET_BYTES,  # least size of the buckets that `gradient` hands out during backward
    ) -> None:
        self.binding = binding
        self.ranges: Ranges = binding.ranges if binding is not None else ()
        self.now_s = self._now_s = now_s
        self.samples = self.round_samples = 0
        self.step, self.batch, self.update_time_s, self.loss = 0, -1, 0.0, math.nan
        self.round: int | None = None  # every round is a step
        # Only user loops set these.
        self.changed_outside = self.moves = self.scaled = self.skipped = False
        self.shares: RoundShares | None = None  # batches are dealt alike
        self.deal: RoundDeal | None = None
        self.given: dict[str, Any] | None = None
        self.progress: RunProgress | None = None  # of the whole run, told of every step
        self.before_meeting: Callable[[], None] | None = None
        self.lookups: Lookups | None = None
        self.without_batch: Callable[[], None] | None = None  # takes part in others' passes, if layers are sharded
        self._append = recorder.append if recorder is not None else None
        self._accruals: Accruals | None = None
        self._waits, self._staleness = waits, staleness
        self._stopped, self._incarnation, self._bucket_bytes = stopped, incarnation, bucket_bytes
        self._counts, self._rounds = (_NewCounts(counts) if counts is not None else None), rounds
        self._slowness = Slowness(slow, stopped) if slow > 1 else None
        self._private: torch.Tensor | None = None
        self.closure: bool | None = None
        self.evaluations: Any = None
        self._read_version = 0
        self._started_s = self._input_s = self._gradient_started_s = self._gradient_ended_s = self._apply_s = 0.0

    @property
    def rows(self) -> Rows | None:
        """None: the gradient is dense."""
        return None

    @property
    def tables(self) -> Sequence[Table]:
        """Those of the binding; none where only time is simulated."""
        return self.binding.tables if self.binding is not None else ()

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The parameters' shapes; none where only time is simulated."""
        return [tuple(one.shape) for one in self.binding.parameters] if self.binding is not None else ()

    def take_rows(self) -> None:
        """Does nothing: the gradient is dense."""

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Nothing: the optimizer is our own, and begins."""
        return {}

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        begun_s = self._now_s()
        self._private = torch.empty_like(x) if self._private is None else self._private
        self._private.copy_(x)
        self._apply_s += self._now_s() - begun_s
        return self._private

    def applied(self, version: int, gradient_version: int, failed_publishes: int = 0) -> None:
        if self._staleness is not None:
            self._staleness.add(version - 1 - self._read_version)
        self._record(version, gradient_version, failed_publishes)

    def dropped(self, gradient_version: int, failed_publishes: int = 0) -> None:
        self._record(-1, gradient_version, failed_publishes)

    @property
    def rounds_begun(self) -> int:
        return self.deal.begun if self.deal is not None else 0

    def meet(self, members: Sequence[int], rounds: int | None = None) -> None:
        if self.deal is not None:
            self.deal.meet(members, rounds)
        self._take_part(members)

    def let_in(self, members: Sequence[int]) -> dict[str, Any]:
        assert self.deal is not None
        self._take_part(members)
        return self.deal.let_in(members)

    def _take_part(self, members: Sequence[int]) -> None:
        if self.progress is not None:
            self.progress.go_on_with(len(members))

    def _counts_for_newcomers(self) -> dict[str, Any]:
        """This replica's counts before its present step, which newcomers take part in."""
        return {"step": self.step - 1, "num_ended": self._rounds.num_ended if self._rounds is not None else 0}

    def _take_counts(self, given: dict[str, Any]) -> None:
        self.given, self.step = given, given["step"]
        if self._rounds is not None:
            self._rounds.num_ended = given["num_ended"]
        self._take_part(given["deal"]["members"])

    def absent(self, version: int) -> None:
        self._record(_NO_GRADIENT, version, 0)

    def accrued(self) -> None:
        if self._accruals is None and self._append is not None:
            self._accruals = self._make_accruals()
        self._record(ACCRUED, ACCRUED, 0)

    def settled(self, version: int) -> None:
        if self._accruals is not None:
            self._accruals.settle(version, max(version - 1, 0))

    def _make_accruals(self) -> Accruals:
        assert self._append is not None
        accruals = Accruals(self._append)
        self._append = accruals.append
        return accruals

    # Between two gradients the caches are full of parameters: a Python call then costs close to a microsecond instead of a
    # tenth. So the code below, which runs in every step, makes few calls.

    def _begin_step(self, started_s: float) -> None:
        self.step += 1
        self._started_s, self._apply_s, self.loss = started_s, 0.0, math.nan
        for wait in self._waits:
            wait.waited_s = 0.0
        self._input_s = self._now_s() - started_s

    def _count_apply(self, begun_s: float) -> None:
        took_s = self._now_s() - begun_s
        self._apply_s += took_s
        self.update_time_s += _UPDATE_TIME_SMOOTHING * (took_s - self.update_time_s) if self.update_time_s else took_s

    @property
    def _work_s(self) -> float:
        """The step's time without its waits."""
        return self._input_s + self._gradient_ended_s - self._gradient_started_s + self._apply_s

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        if self._rounds is not None:
            self._rounds.num_ended += 1
        if self.shares is not None and self.samples:
            self.shares.note(self.samples, self._work_s)
        if self._append is None:
            return
        waited_s = 0.0
        for wait in self._waits:
            waited_s += wait.waited_s
        new = self._counts.take() if self._counts is not None else _NO_COUNTS
        self._append(
            self.step,
            self.batch,
            self._incarnation,
            self.samples if applied_version != _NO_GRADIENT else 0,
            self._read_version,
            gradient_version,
            applied_version,
            failed_publishes,
            *new[:7],
            self._started_s,
            self._input_s,
            self._gradient_started_s,
            self._gradient_ended_s,
            waited_s,
            self._apply_s,
            *new[7:],
            self._now_s(),
            self.loss,
        )


class _NewCounts:
    """What a worker has communicated since its last step's record: differences of counts that grow, and the longest wait."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts  # the worker's, of its whole life
        self._before = _NO_COUNTS

    def take(self) -> tuple[int, int, int, int, int, int, int, float, float]:
        counts, before = self._counts, self._before
        partner, partner_s = counts.partner, counts.partner_s
        counts.partner, counts.partner_s = 0, 0.0
        now = self._before = (
            counts.messages, counts.sent_bytes, counts.averages, counts.peer_failures,
            counts.coded_elements, counts.coded_bytes, counts.codec_s,
        )  # fmt: skip
        m, b, a, f = now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]
        if not now[4]:
            return m, b, a, f, 0, 0, partner, 0.0, partner_s
        return m, b, a, f, now[4] - before[4], now[5] - before[5], partner, now[6] - before[6], partner_s
