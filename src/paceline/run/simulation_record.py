"""The record of a simulation: steps and evaluations on virtual time, and the result."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from paceline.algorithms import Algorithm
from paceline.ports.shared import AVERAGE
from paceline.records.order import ORDER, OrderWriter
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE, PackedRecords, last_s, without_waiting
from paceline.run.run_record import RunRecord
from paceline.simulator.machine import SimulatedMachine
from paceline.specs.goal import Goal
from paceline.system.interrupts import Interruption
from paceline.system.torch_random import torch_undisturbed
from paceline.worker.evaluator import Evaluator
from paceline.worker.supervised import Outcome

_NAMES: tuple[str, ...] = RECORD_DTYPE.names or ()
_SAMPLES, _APPLIED, _LOSS = (_NAMES.index(name) for name in ("samples", "applied_version", "loss"))


class SimulationRecord(RunRecord):
    """Collects the workers' records, evaluates when an epoch ends, and stops the run at its target.

    Evaluations take no virtual time. Stopping ends the run at that instant: steps under way are not recorded.

    Attributes:
        before_evaluation: gives the model the run's buffers, if workers have their own; None: it has them.
        notes: of the result.
        outcome: how the run has ended, or will if nothing else happens.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        algorithm: Algorithm,
        goal: Goal,
        about: Mapping[str, Any],  # identifies the run in its result
        *,
        evaluator: Evaluator | None,  # None: nothing is evaluated
        buffers: Mapping[str, torch.Tensor],
        initial_loss: float | None = None,
        epoch_samples: int = 0,  # in an epoch; 0: not known yet
        timing_only: bool = False,
    ) -> None:
        super().__init__(goal, initial_loss)
        note = algorithm.note(machine.cluster.workers)
        self.outcome = Outcome()
        self.before_evaluation: Callable[[], None] | None = None
        self.notes = [note] if note else []
        self._about = {**about, **({"notes": self.notes} if note else {})}
        self._algorithm = algorithm
        self._machine = machine
        self._evaluator = evaluator
        self._timing_only = timing_only
        self.shared, self._buffers = machine.shared, buffers
        self._recorded = _Records(machine.cluster.workers)
        self._unrecorded_of_replaced = 0
        self._order: dict[int, PackedRecords] = {}
        if machine.needs.order and not timing_only:
            machine.further_ports = lambda *process: {"decided": self._order_of(*process)}
        self.know_epoch(epoch_samples)

    def recorder(self, worker_id: int) -> _Recorder:
        watched = (self._evaluator, self.goal.target_loss, self.goal.limit_samples)
        return _Recorder(self._recorded, worker_id, self._watch if any(one is not None for one in watched) else None)

    def _order_of(self, worker_id: int, incarnation: int) -> OrderWriter:
        return OrderWriter(self._order.setdefault(worker_id, PackedRecords(ORDER)).append, incarnation)

    def know_epoch(self, samples: int) -> None:
        """Notes about how many samples an epoch has, which decides how often to evaluate."""
        self._evaluate_every = self.goal.evaluate_every(samples)

    def records_of(self, worker_id: int) -> np.ndarray:
        return self._recorded.of(worker_id)

    def end(self, outcome: str, reason: str, trace: str = "") -> None:
        self.outcome.name, self.outcome.reason, self.outcome.trace = outcome, reason, trace

    def interrupted_by(self, interruption: Interruption) -> None:
        """Records whether a signal has ended the run; its sender does not wait for an evaluation."""
        if interruption and self.outcome.name == "stopped":
            self.outcome.interrupt(interruption.name)
            self._evaluator = None

    def _watch(self, fields: tuple[float, ...]) -> None:
        if fields[_APPLIED] < 1:
            return
        before, every = self.samples, self._evaluate_every
        self.samples += int(fields[_SAMPLES])
        loss = fields[_LOSS]
        if loss == loss:  # not NaN
            self._losses.append(loss)
        is_over = self.is_at_goal()
        if self._evaluator is not None and self.samples // every > before // every:
            is_over = self._evaluate(self._evaluator, self._machine.scheduler.now_s) or is_over
        if is_over:
            self._machine.scheduler.stop()

    def extra(self, name: str) -> torch.Tensor:
        """As in `Evaluated`: a buffer, by `buffer <name>`; its average, by `average buffer <name>`."""
        if name.startswith(AVERAGE):
            return self.shared.average_buffers[name.removeprefix(AVERAGE)]
        return self._buffers[name]

    def _evaluate(self, evaluator: Evaluator, elapsed_s: float) -> bool:
        """Evaluates now; returns whether the target accuracy is reached."""
        if self.before_evaluation is not None:
            self.before_evaluation()
        about = {"elapsed_s": elapsed_s, "samples": self.samples, "train_loss": self.loss}
        with torch_undisturbed():
            return self.take_evaluation(evaluator.now(self, about))

    def finish(self, config: dict[str, Any], *, num_parameters: int) -> RunData:
        machine, outcome, is_gossip = self._machine, self.outcome, self._algorithm.gossip
        records = self._recorded.by_worker()
        # Their worker was killed, or the run stopped, before the worker learnt of them.
        lost = self.unrecorded_updates(self._algorithm, records, machine.shared)
        if not is_gossip:
            records = without_waiting(records, machine.shared.version)
        wall_s = last_s(records)
        if outcome.name == "stopped" and machine.lives.all_dead:
            self.end("crashed", "All workers were killed, and no worker is left.")
        if outcome.name == "crashed":  # of it: until the others knew
            wall_s = max(wall_s, machine.scheduler.now_s)
        of_models = ("consensus_distance", "worst_worker_accuracy") if is_gossip else ()
        own_models: dict[str, float | None] = dict.fromkeys(of_models)
        if is_gossip and not self._timing_only:
            own_models["consensus_distance"] = machine.shared.consensus_distance()
        if self._evaluator is not None:
            self._evaluate(self._evaluator, wall_s)
            self.end_if_not_finite(outcome, finite=self._evaluator.finite)
            if is_gossip:
                with torch_undisturbed():
                    own_models["worst_worker_accuracy"] = self._evaluator.worst_worker_accuracy(self)
        outcome.workers_lost, outcome.restarts = sorted(machine.lives.lost), machine.lives.restarts
        result = self.figures(
            records,
            outcome,
            about={**self._about, "num_parameters": num_parameters, "timing_only": self._timing_only},
            algorithm=self._algorithm,
            num_workers=machine.cluster.workers,
            wall_s=wall_s,
            shared=machine.shared,
            own_models=own_models,
            unresolved_exchanges=machine.unresolved_exchanges,
            delay=machine.delay,
            updates_lost=lost,
            records_lost=lost + self._unrecorded_rounds(records),
            has_ended_itself=machine.lives.all_ended,
        )
        self.notes += self.choice_notes(self._algorithm, machine.cluster.workers, machine.delay)
        if self.notes:
            result["notes"] = self.notes
        if (counts := getattr(machine.shared, "counts", None)) is not None:
            result["shards"] = counts()
        order = {worker: own for worker, rows in sorted(self._order.items()) if len(own := rows.array())}
        return RunData(config, result, records, self.evaluations, order=order)

    def count_unrecorded_of(self, worker_id: int, end: int) -> None:
        """Counts the record that a dead worker, which is being replaced, lacks if it took part in update `end`."""
        last = int(self.records_of(worker_id)["applied_version"].max(initial=0))
        self._unrecorded_of_replaced += end > last

    def _unrecorded_rounds(self, records: dict[int, np.ndarray]) -> int:
        """Missing records of workers that died after a round had their gradient: at most one each."""
        if not (self._algorithm.survivors_continue and self._algorithm.together):
            return 0
        ends = [(worker, self._machine.shared.ends[worker]) for worker in self._machine.lives.lost]
        return self._unrecorded_of_replaced + self.lacking(records, ends)


class _Records:
    """The records of all workers in one buffer: those of thousands of workers would not stay in the cache."""

    def __init__(self, num_workers: int) -> None:
        self.packed = PackedRecords()
        self.workers = array("i")  # of each record
        self._num_workers = num_workers

    def of(self, worker_id: int) -> np.ndarray:
        return self.packed.array()[np.frombuffer(bytes(self.workers), np.int32) == worker_id]

    def by_worker(self) -> dict[int, np.ndarray]:
        workers = np.frombuffer(bytes(self.workers), np.int32)
        ordered = self.packed.array()[np.argsort(workers, kind="stable")]
        ends = np.cumsum(np.bincount(workers, minlength=self._num_workers)).tolist()
        return {worker: ordered[first:end] for worker, (first, end) in enumerate(pairwise([0, *ends]))}


@dataclass(slots=True)
class _Recorder:
    records: _Records
    worker_id: int
    watch: Callable[[tuple[float, ...]], None] | None

    def append(self, *fields: float) -> None:
        records = self.records
        records.packed.append(*fields)
        records.workers.append(self.worker_id)
        if self.watch is not None:
            self.watch(fields)
