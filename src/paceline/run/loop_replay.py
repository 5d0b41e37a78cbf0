"""The replay of a run of one's own loop under `launch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, cast

import numpy as np
import torch

from paceline.data.epoch_claims import EpochClaims
from paceline.errors import DivergedError, PacelineError, WorkerLostError
from paceline.membership.final_mean import BatchesTaken, FinalMean, LeftWeights
from paceline.records.accruals import ACCRUED
from paceline.records.step_record import RECORD_DTYPE
from paceline.run.gossip_order import TakesAverages
from paceline.run.recorded_order import (
    COMPARED,
    RepeatingReplica,
    ReplayMismatchError,
    TakesTurns,
    compare_step,
    first_step,
)
from paceline.run.repetition import Recorded, Repetition
from paceline.run.simulate import LoopSimulation
from paceline.run.simulated_membership import SimulatedMembership
from paceline.run.simulated_replica import SimulatedAttachedReplica
from paceline.simulator.faults import Faults
from paceline.simulator.machine import SimulatedMachine
from paceline.simulator.program import DeadlockError, ProgramError
from paceline.specs.goal import Goal
from paceline.system.machine import intra_op_threads
from paceline.worker.gathering import Call, Gatherer
from paceline.worker.memberships.membership import BatchShare

_PLACES = [(RECORD_DTYPE.names or ()).index(name) for name in COMPARED]


class RecordedBatches(EpochClaims):
    """Gives a loop the batches that one worker trained on, in its order, where workers claim them.

    Args:
        numbers: of these batches.
        end: above the numbers of all workers' batches; an epoch from there on is one that the run did not have.
        agree: as `EpochClaims.agree`, of all workers.
    """

    def __init__(self, numbers: Sequence[int], end: float, agree: Callable[..., Sequence[int]]) -> None:
        self._numbers, self._end, self._agree = list(reversed(numbers)), end, agree

    def claim(self, epoch: int) -> None:
        """Does nothing: which batches a worker takes is recorded."""

    def newest(self) -> int:
        return 0

    def agree(self, epoch: int, numbers: Sequence[int]) -> Sequence[int]:
        return self._agree(epoch, numbers)

    def take_released(self, first: int, end: int) -> int | None:
        if first >= self._end:
            raise ReplayMismatchError("The replay differs from the run: the loop begins one more epoch.", -1)
        return self._numbers.pop() if self._numbers and first <= self._numbers[-1] < end else None


class RecordedLoop(RepeatingReplica, SimulatedAttachedReplica):
    """A loop's worker that repeats its recorded steps; what it records is compared with them.

    Args:
        rows: the records of the worker.
        keeps: the update whose gradients are kept, if this worker computes any for it.
        may_go_on: whether the loop may make steps that have no record, as the run has ended before it.
        is_cut_off: whether the replay has ended, and the loop leaves its step unfinished.

    Attributes:
        kept: step -> its kept gradient (P,), as `backward` has left it.
        samples_of: batch of such a step -> the sampler's output for it; None: it has no sampler.
        compared: number of steps that were equal.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        rows: np.ndarray,
        keeps: int | None,
        may_go_on: bool,
        is_cut_off: Callable[[], bool],
        recorder: Any,
        **base: Any,
    ) -> None:
        self._recorded, self._keeps, self._may_go_on, self._is_cut_off = rows, keeps, may_go_on, is_cut_off
        self._first_step = first_step(rows)
        self._write = recorder.append
        self.kept: dict[int, torch.Tensor] = {}
        self.samples_of: dict[int, Any] = {}
        self.compared = 0
        super().__init__(optimizer, recorder=self, **base)

    @property
    def next_row(self) -> Any:
        """The record of the first step that was not compared; None: all were."""
        return self._recorded[self.compared] if self.compared < len(self._recorded) else None

    @property
    def _row(self) -> Any:
        place = self.step - self._first_step
        return self._recorded[place] if place < len(self._recorded) else None

    def gradient(self, at: torch.Tensor, version: int, *in_backward: Any, **named: Any) -> None:
        super().gradient(at, version, *in_backward, **named)
        if self._row is None and not self._may_go_on:
            raise self._one_more()
        if self._row is not None and self._keeps is not None and self._row["applied_version"] == self._keeps:
            self._keep()
        if self._row is not None:
            self._computed()

    def _keep(self) -> None:
        self.kept[self.step] = g = self.binding.zeros()
        for part, parameter in zip(self.binding.views(g), self.binding.parameters, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.to_dense())
        if self.claims is not None and self.batch >= 0:
            self.samples_of[self.batch] = self.claims.batches.indices(self.claims.place(self.batch))

    def _record(self, applied_version: int, gradient_version: int, failed_publishes: int) -> None:
        super()._record(applied_version, gradient_version, failed_publishes)
        if self._on_applied is not None and applied_version != ACCRUED:
            self._on_applied(applied_version)

    def append(self, *fields: float) -> None:
        """Takes one record, as a `Recorder`, and compares it: the loop may report a loss after its step."""
        if self._is_cut_off():  # the step lacks the loss that the loop would still have reported
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


class _OrderedLoop(TakesTurns, RecordedLoop):
    """A loop's worker that takes turns."""


class _AveragingLoop(TakesAverages, RecordedLoop):
    """A loop's worker whose averages come from the run's records."""


class _ReplayedMembership(SimulatedMembership):
    """A loop's worker in a replay."""

    _run: LoopReplay

    def __init__(self, run: LoopReplay, *args: Any) -> None:
        super().__init__(run, *args)
        self.ports = run.ports_of(self.ports)
        if run.changes:
            self.gatherer = _MortalGatherer(self.gatherer, self)
        self.random_states = self.random_states if run.has_processes else ()
        self.stopped = partial(run.is_over, self.worker_id)

    def batches(self) -> BatchShare:
        if self._algorithm.in_rounds or self.num_workers == 1:
            return super().batches()
        return BatchShare(self._run.batches_of(self.worker_id))

    def before_gathering(self, num_gathered: int) -> None:
        """Does not return if the worker dies here."""
        self._run.before_gathering(self.worker_id, num_gathered)

    def final_model(self, out: torch.Tensor, given: BatchesTaken, left: LeftWeights | None) -> FinalMean | None:
        """As in `Membership`; the mean of workers' own models needs no messages."""
        run, shared = self._run, cast(Any, self._machine.shared)
        if self._algorithm.gossip:
            run.end_averages(self.worker_id)
            run.left = left or run.left
            run.ending.gather(self.worker_id, None)
            if run.left is not None:
                shared.replace(run.left.x)
            shared.snapshot(out)
            return None
        return super().final_model(out, given, left)


class _MortalGatherer:
    """Implements `Gatherer` for a worker that may have died before the others had its value."""

    def __init__(self, gatherer: Gatherer, member: _ReplayedMembership) -> None:
        self._gatherer, self._member, self._num_gathered = gatherer, member, 0
        self.leave = gatherer.leave

    def gather(self, value: Any, call: Call | None = None) -> list[Any]:
        if self._member.has_entered:
            self._member.before_gathering(self._num_gathered)
            self._num_gathered += 1
        return self._gatherer.gather(value)


class LoopReplay(Repetition, LoopSimulation):
    """One repetition of a run of one's own loop. Args: as for `Repetition`; `train` is the loop's function."""

    member_kind = _ReplayedMembership

    def __init__(
        self, train: Callable[[], Any], run: Recorded, version: int | None, shards: Sequence[int] = (), **named: Any
    ) -> None:
        Repetition.__init__(self, run, version, shards, **named)
        config, cluster, self.changes = run.config, self.cluster_of(run), run.changes
        train = _until_diverged(train) if run.is_cut else train
        LoopSimulation.__init__(self, train, cluster, run.algorithm, config.seed, Faults(), Goal(), is_evaluated=False)
        self.has_processes = config.backend == "processes"
        self._waits = ""  # for what its workers wait, if none can go on

    def run_programs(self) -> None:
        try:
            with intra_op_threads(self._run.config.intra_op_threads):
                self.run_loops()
        except DeadlockError as error:
            self._waits = error.waits
            raise
        except ProgramError as error:
            if isinstance(error.cause, WorkerLostError):  # its loop has ended before the others', and not as in the run
                raise self._contradiction("A worker's loop ends before those of the others.") from None
            raise error.cause from None
        if self.machine is None:
            raise self.never_attached()
        if not self._ends_there and self._version == self.machine.shared.version and not self.algorithm.gossip:
            self.kept = self.binding.zeros()  # with what the loop has left in its model
            self.machine.shared.snapshot(self.kept)

    def samples_of(self, batch: int) -> torch.Tensor | None:
        found = [one.samples_of[batch] for one in self._replicas.values() if one.samples_of.get(batch) is not None]
        return torch.tensor(found[0]) if found else None

    def _contradiction(self, why: str) -> PacelineError:
        """The loop is not that of the run: names the first step that it has not made."""
        left = [(one.next_row, worker) for (worker, _), one in self._replicas.items()]
        rows = [(row["applied_version"].item(), row["step"].item(), worker) for row, worker in left if row is not None]
        if not rows:
            return super()._contradiction(why)
        version, step, worker_id = min(rows)
        ended = f"its workers wait for each other ({self._waits})" if self._waits else "it ended"
        return ReplayMismatchError(
            f"The replay differs from the run: {ended} before step {step} of worker {worker_id}"
            f"{f', the gradient of update {version}' if version > 0 else ''}.",
            version,
            worker_id,
        )

    def order_programs(self, machine: SimulatedMachine) -> None:
        self.binding = self._wanted
        super().order_programs(machine)

    def leave(self, worker_id: int) -> None:
        super().leave(worker_id)
        self.ending.leave(worker_id)

    # What its workers ask for

    def before_gathering(self, worker_id: int, num_gathered: int) -> None:
        assert self._deaths is not None
        self._deaths.gather(worker_id, num_gathered)

    def batches_of(self, worker_id: int) -> RecordedBatches:
        every = [int(rows["batch"].max(initial=-1)) for own in self._run.processes.values() for rows in own]
        numbers = self._rows(worker_id, 0)["batch"]
        end = float("inf") if self._run.is_cut else 1 + max(every)
        return RecordedBatches(numbers[numbers >= 0].tolist(), end, self.epoch_claims.agree)

    def is_over(self, worker_id: int) -> bool:
        """Whether the run has ended before its loops, and the worker has made its last step."""
        newest = self.machine.lives.incarnations.get(worker_id, 0) if self.machine is not None else 0
        replica = self._replicas.get((worker_id, newest))
        if not self._run.is_cut or replica is None:
            return False
        last = self._run.num_rounds if self.algorithm.in_rounds else len(self._rows(worker_id, 0))
        return replica.step + replica.idle > last

    def end_averages(self, worker_id: int) -> None:
        if self._averages is not None:
            self._averages.until((worker_id, 0), self.machine.shared.workers[worker_id], float("inf"))

    def new_replica(
        self, member: SimulatedMembership, optimizer: torch.optim.Optimizer, **base: Any
    ) -> SimulatedAttachedReplica:
        worker_id = member.worker_id
        process, applied = (worker_id, member.incarnation), partial(self._applied, worker_id)
        base |= {
            "rows": self._rows(*process),
            "keeps": self._version if self._ends_there and self._is_maker(process) else None,
            "may_go_on": self._run.is_cut or (self._deaths is not None and self._deaths.has(process)),
            "stopped": member.stopped,
            "is_cut_off": lambda: self.scheduler.has_ended,
        }
        if self._averages is not None:
            shared, on_own = self.machine.shared.workers[worker_id], applied if process == self._maker else None
            on_own = partial(self._applied_other, process) if process in self._others else on_own
            replica: RecordedLoop = _AveragingLoop(
                optimizer, averages=self._averages, shared=shared, on_own=on_own, **base
            )
        elif self._turns is not None:
            replica = _OrderedLoop(optimizer, turns=self._turns, on_applied=self._turns.updated, **base)
        else:
            replica = RecordedLoop(optimizer, on_applied=None if self._orders else applied, **base)
        self._replicas[process] = replica
        return replica


def _until_diverged(train: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps `train` so that a `DivergedError` ends its worker without failing the replay, as in a run."""

    @wraps(train)
    def until_diverged() -> Any:
        with suppress(DivergedError):
            return train()

    return until_diverged
