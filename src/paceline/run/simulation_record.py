"""What is recorded of a simulation: steps and evaluations on virtual time, the result, and the host's part apart."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.evaluation.model import ModelEvaluator
from paceline.observe.written import write_run
from paceline.ports.shared import AVERAGE
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE, RECORD_STRUCT, without_waiting
from paceline.records.summary import NO_UPDATE, WINDOW, summarize, unrecorded
from paceline.run.config import TrainConfig
from paceline.simulator.machine import SimulatedMachine
from paceline.system.interrupts import Interruption
from paceline.system.machine import machine, versions

__all__ = ["SimulationRecord", "write_simulation"]

_OWN_MODELS = 16  # evaluated at the end
_TRACED_STEPS = 50_000  # of all workers together: some 40 MB of trace
_TRACED_WORKERS = 256  # no viewer shows thousands of lanes
_NAMES: tuple[str, ...] = RECORD_DTYPE.names or ()
_SAMPLES, _APPLIED, _LOSS = (_NAMES.index(name) for name in ("samples", "applied_version", "loss"))


class SimulationRecord:
    """Collects the workers' records, evaluates where an epoch ends, and stops the run at its target.

    Evaluations take no virtual time. Stopping ends the run at that instant: steps under way are not recorded.

    Args:
        config: of the run, with the task's defaults.
        simulated: what runs.
        evaluator: None: nothing is evaluated (timing only).
        buffers: of the run's model, by name.
        initial_loss: before the first update.
        num_samples: in an epoch.
        limit_samples: stop after so many samples of applied gradients; None: no limit.
        is_gossip: whether every worker has a model of its own.
        together: whether several workers' gradients make one update.
        waits: whether gradients may be applied later than they come.
        timing_only: whether no gradients are computed; None: if nothing is evaluated.
        about: more for the result.

    Attributes:
        before_evaluation: gives the model the run's buffers, where workers have their own; None: it has them.
    """

    def __init__(
        self,
        config: TrainConfig,
        simulated: SimulatedMachine,
        evaluator: ModelEvaluator | None,
        buffers: Mapping[str, torch.Tensor],
        initial_loss: float | None,
        num_samples: int,
        *,
        limit_samples: int | None = None,
        is_gossip: bool = False,
        together: bool = False,
        waits: bool = False,
        timing_only: bool | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._timing_only = evaluator is None if timing_only is None else timing_only
        self._about = dict(about or {})
        self._is_gossip = is_gossip
        self._together = together
        self._waits = waits
        self._config = config
        self._simulated = simulated
        self._evaluator = evaluator
        self._limit_samples = limit_samples
        self._snapshot = _Snapshot(simulated.shared, buffers)
        self._initial_loss = initial_loss
        self._recorded = _Records(config.workers)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._samples = 0
        self.evaluate_every(num_samples // (4 if config.target_accuracy is not None else 1))
        self._evaluations: list[dict[str, Any]] = []
        self._outcome, self._reason, self._trace = "stopped", "", ""
        self.before_evaluation: Callable[[], None] | None = None

    def recorder(self, worker_id: int) -> _Recorder:
        """Takes one worker's records."""
        limits = (self._evaluator, self._config.target_loss, self._limit_samples)
        return _Recorder(self._recorded, worker_id, self._watch if any(one is not None for one in limits) else None)

    def evaluate_every(self, samples: int) -> None:
        """How many samples of applied gradients lie between two evaluations."""
        self._evaluate_every = max(1, samples)
        self._next_evaluation = (self._samples // self._evaluate_every + 1) * self._evaluate_every

    def records_of(self, worker_id: int) -> np.ndarray:
        """One worker's records so far."""
        return self._recorded.of(worker_id)

    def end(self, outcome: str, reason: str, trace: str = "") -> None:
        """Says how the run ended, if not by itself."""
        self._outcome, self._reason, self._trace = outcome, reason, trace

    def interrupted_by(self, interruption: Interruption) -> None:
        """A signal has ended the run, if one has: whoever sent it does not wait for an evaluation."""
        if interruption and self._outcome == "stopped":
            self.end("stopped", f"Interrupted by {interruption.name}.")
            self._evaluator = None

    def _watch(self, fields: tuple[float, ...]) -> None:
        if fields[_APPLIED] < 1:
            return
        self._samples += int(fields[_SAMPLES])
        loss, target = fields[_LOSS], self._config.target_loss
        if loss == loss:  # not NaN
            self._losses.append(loss)
            if target is not None and len(self._losses) == WINDOW and self._mean_loss <= target:
                self._simulated.scheduler.stop()
        if self._limit_samples is not None and self._samples >= self._limit_samples:
            self._simulated.scheduler.stop()
        if self._evaluator is not None and self._samples >= self._next_evaluation:
            self._next_evaluation = (self._samples // self._evaluate_every + 1) * self._evaluate_every
            evaluation = self._evaluate(self._simulated.scheduler.now_s)
            accuracy, goal = evaluation["test_accuracy"], self._config.target_accuracy
            if goal is not None and accuracy is not None and accuracy >= goal:
                self._simulated.scheduler.stop()

    @property
    def _mean_loss(self) -> float:
        return float(np.mean(self._losses))

    def _evaluate(self, elapsed_s: float) -> dict[str, Any]:
        assert self._evaluator is not None
        if self.before_evaluation is not None:
            self.before_evaluation()
        train_loss = self._mean_loss if self._losses else None
        about = {"elapsed_s": elapsed_s, "samples": self._samples, "train_loss": train_loss}
        with torch.random.fork_rng(devices=[]):
            evaluation = self._evaluator.now(self._snapshot, about)
        if self._is_gossip:
            evaluation["consensus_distance"] = self._simulated.shared.consensus_distance()
        self._evaluations.append(evaluation)
        return evaluation

    def finish(self, config: dict[str, Any], *, num_parameters: int) -> RunData:
        """The run as data."""
        records = self._recorded.by_worker()
        records_lost = self._records_lost(records)
        if not self._is_gossip:
            records = without_waiting(records, self._simulated.shared.version)
        wall_s = max((float(rows["ended_s"][-1]) for rows in records.values() if len(rows)), default=0.0)
        if self._outcome == "stopped" and self._simulated.all_dead:
            self.end("crashed", "All workers were killed, and no worker is left.")
        if self._outcome == "crashed":  # of it: until the others knew
            wall_s = max(wall_s, self._simulated.scheduler.now_s)
        own_models: dict[str, Any] = (
            {"consensus_distance": None, "worst_worker_accuracy": None} if self._is_gossip else {}
        )
        if self._evaluator is not None:
            evaluation = self._evaluate(wall_s)
            if self._outcome == "stopped" and not self._evaluator.finite:
                self.end("diverged", f"The parameters are not finite at version {evaluation['version']}.")
            if self._is_gossip:
                own_models["consensus_distance"] = evaluation["consensus_distance"]
                own_models["worst_worker_accuracy"] = self._worst_worker_accuracy()
        elif self._is_gossip and not self._timing_only:
            own_models["consensus_distance"] = self._simulated.shared.consensus_distance()
        own = self._config
        figures = summarize(
            records,
            num_workers=own.workers,
            wall_s=wall_s,
            initial_loss=self._initial_loss,
            target_loss=own.target_loss,
            target_accuracy=own.target_accuracy,
            evaluations=self._evaluations,
            lockstep=self._together,
            gossip=self._is_gossip,
        )
        figures["steps"] += records_lost
        if self._outcome == "stopped" and figures["time_to_target_s"] is not None:
            self._outcome = "converged"
        if self._outcome == "stopped" and not figures["steps"] and self._simulated.all_ended:
            self.end("crashed", NO_UPDATE)
        touched = getattr(self._simulated.shared, "touched_slots", None)
        result = {
            **{key: getattr(own, key) for key in ("task", "algorithm", "workers", "backend", "seed", "batch_size")},
            **self._about,
            "num_parameters": num_parameters,
            "timing_only": self._timing_only,
            "outcome": self._outcome,
            "outcome_reason": self._reason,
            "outcome_trace": self._trace,
            **figures,
            "gossip": self._is_gossip,
            **own_models,
            "unresolved_exchanges": self._simulated.unresolved_exchanges,
            "workers_lost": sorted(self._simulated.lost),
            "restarts": self._simulated.restarts,
            "records_lost": records_lost,
            "initial_loss": self._initial_loss,
            "version": self._simulated.shared.version,
            "target_loss": own.target_loss,
            "target_accuracy": own.target_accuracy,
            "vectors_touched": touched() if touched is not None else None,
            **({"shards": counts()} if (counts := getattr(self._simulated.shared, "counts", None)) is not None else {}),
        }
        return RunData(config, result, records, self._evaluations)

    def _records_lost(self, records: dict[int, np.ndarray]) -> int:
        """Updates without a record: their workers were killed, or the run was stopped, before they had heard of them."""
        shared = self._simulated.shared
        if self._is_gossip:
            written = (np.count_nonzero(rows["applied_version"] >= 1) for _, rows in sorted(records.items()))
            return sum(made - int(n) for made, n in zip(shared.updates(), written, strict=False))
        return unrecorded(records, shared.version, waits=self._waits)

    def _worst_worker_accuracy(self) -> float | None:
        """The lowest test accuracy of any worker's own model, of at most 16 workers, evenly spaced among those not lost."""
        assert self._evaluator is not None
        shared, buffers = self._simulated.shared, self._snapshot.buffers
        chosen = shared.present[:: -(-len(shared.present) // _OWN_MODELS)]
        accuracies = []
        with torch.random.fork_rng(devices=[]):
            for worker in chosen:
                evaluation = self._evaluator.now(_Snapshot(shared.workers[worker], buffers), {})
                accuracies.append(evaluation["test_accuracy"])
        return min((one for one in accuracies if one is not None), default=None)


class _Records:
    """The records of all workers, packed, in the order in which they were made.

    Millions of tuples would keep the garbage collector busy, and a buffer for each of thousands of workers would be in no
    cache when its turn comes.
    """

    def __init__(self, num_workers: int) -> None:
        self.data = bytearray()
        self.workers = array("i")  # of each record
        self._num_workers = num_workers

    def of(self, worker_id: int) -> np.ndarray:
        """One worker's records."""
        return self._all()[np.frombuffer(bytes(self.workers), np.int32) == worker_id]

    def by_worker(self) -> dict[int, np.ndarray]:
        """The records of each worker."""
        workers = np.frombuffer(bytes(self.workers), np.int32)
        ordered = self._all()[np.argsort(workers, kind="stable")]
        ends = np.cumsum(np.bincount(workers, minlength=self._num_workers)).tolist()
        return {worker: ordered[first:end] for worker, (first, end) in enumerate(pairwise([0, *ends]))}

    def _all(self) -> np.ndarray:
        return np.frombuffer(bytes(self.data), RECORD_DTYPE)


class _Recorder:
    """Takes one worker's records."""

    __slots__ = ("_records", "_watch", "_worker_id")

    def __init__(self, records: _Records, worker_id: int, watch: Callable[[tuple[float, ...]], None] | None) -> None:
        self._records = records
        self._worker_id = worker_id
        self._watch = watch

    def append(self, *fields: float) -> None:
        """Takes one record."""
        records = self._records
        records.data += RECORD_STRUCT.pack(*fields)
        records.workers.append(self._worker_id)
        if self._watch is not None:
            self._watch(fields)


class _Snapshot:
    """What a `ModelEvaluator` evaluates: parameters with a `snapshot`, and the model's buffers."""

    def __init__(self, shared: Any, buffers: Mapping[str, torch.Tensor]) -> None:
        self.shared = shared
        self.buffers = buffers

    def extra(self, name: str) -> torch.Tensor:
        """A buffer, by `buffer <name>`; its average, by `average buffer <name>`."""
        if name.startswith(AVERAGE):
            return self.shared.average_buffers[name.removeprefix(f"{AVERAGE}buffer ")]
        return self.buffers[name.removeprefix("buffer ")]


def write_simulation(run: RunData, out: Path, *, host: dict[str, Any], command: str) -> None:
    """Writes a run's folder. All of it but `host.json` and the report depends on the simulation only."""
    workers = min(max(1, len(run.records)), _TRACED_WORKERS)
    write_run(
        run,
        out,
        title=f"{run.config['task']}: {run.config['algorithm']}, simulated",
        command=command,
        max_traced_steps=_TRACED_STEPS // workers,
        max_traced_workers=_TRACED_WORKERS,
        host={**host, "machine": machine(), "versions": versions()},
    )
