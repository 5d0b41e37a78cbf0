"""`paceline train` as a function: one task, one algorithm, real workers, and a folder with everything that was measured."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from paceline.algorithms import Algorithm, parse, registry, spec
from paceline.algorithms.server.apply import ApplyRule
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.registries import apply_registry
from paceline.data.plan import BatchPlan, Partition, Skewed, partition_registry
from paceline.data.shared import share_dataset
from paceline.errors import NotWrittenError, UsageError
from paceline.evaluation.model import Evaluator, about_evaluated
from paceline.membership.environment import WorkerEnvironment
from paceline.memory.placement import placement_registry
from paceline.observe.progress import Progress
from paceline.observe.written import write_run
from paceline.records.run_data import RunData, write_json
from paceline.run.config import TrainConfig
from paceline.run.earlier_part import EarlierPart, forget
from paceline.run.injection import inject, injected
from paceline.run.recording import Recording, last_s
from paceline.run.task_worker import TaskWorker
from paceline.specs.bounds import check_vectors
from paceline.specs.registry import check_optimizer
from paceline.storage.held_folder import run_folder
from paceline.supervisor.checkpointer import Checkpointer
from paceline.supervisor.supervisor import Supervisor
from paceline.system.interrupts import noted
from paceline.tasks.base import targets_of
from paceline.tasks.load import load_task
from paceline.worker.supervised import check_launch, ended_in_order

__all__ = ["TrainConfig", "train"]

_PROGRESS_EVERY_S = 0.2
_INITIAL_SAMPLES = 10_000  # the initial loss is a mean over at most so many training samples


def train(
    config: TrainConfig,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> RunData:
    """Trains a task with real workers on this machine.

    Args:
        config: what and how.
        out: the run's folder: events, result, trace, report and checkpoints are written there; None: nothing is.
        resume: a run's folder whose newest checkpoint to go on from; with `out` None it goes on in that folder.
        command: the command line, for the report.
        on_progress: called a few times a second.

    Returns:
        The run; `result["outcome"]` is converged, stopped, diverged or crashed.

    Ctrl-C, and SIGTERM where the program leaves that to the system, end it as a target would: parameters, records and result
    are written, and then the signal takes its course.

    Raises:
        UsageError: the configuration cannot be run, or another process writes the folder; nothing was written.
        NotWrittenError: the disk did not take a file; the error's `run` is what was measured, if the run has ended.
    """
    folder = out if out is not None else resume
    with run_folder(folder, resume):
        training = _Training(config, folder, resume, command, on_progress)
        training.algorithm.warn()
        return training.run()


class _Training:
    """One call of `train`, between its first validation and its last file."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path | None,
        resume: Path | None,
        command: str,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.task = load_task(config.task)
        self.config = config.resolved(self.task)
        self.algorithm: Algorithm = registry.build(self.config.algorithm)
        self.out = out
        self.command = command
        self.on_progress = on_progress
        check_launch(
            num_workers=config.workers,
            backend=config.backend,
            placement=config.placement,
            num_servers=self.algorithm.memory.server_programs,
        )
        self.algorithm.check(config.workers)
        served = self.algorithm.memory.kind == "served"
        if (self.algorithm.lockstep or self.algorithm.gossip or served) and self.config.optimizer_state == "shared":
            where = "at its servers" if served else "on every worker"
            raise UsageError(f"{config.algorithm} keeps an optimizer of its own {where}; leave out the shared state.")
        train_set, self.test_set = self.task.load(config.data)
        self.plan = self._plan(train_set)
        self.algorithm = inject(self.algorithm, self.config, self.plan)
        self.evaluator = Evaluator(self.task, self.test_set, self.config.seed)
        num_vectors = self.algorithm.memory.num_vectors(config.workers)
        check_vectors(num_vectors, self.evaluator.num_parameters, self.evaluator.vector_bytes)
        parameters = self.evaluator.model.parameters()
        check_optimizer(self.config.optimizer, self._rate, config.momentum, parameters=parameters)
        self.train_set, self.dataset_segment = share_dataset(train_set)
        self.earlier = EarlierPart.of(resume)
        previous = self.earlier.run
        if resume is not None:
            self._check_same_delay(previous)
            self._check_same_rule(previous)
        earlier_workers = previous.config.get("workers", config.workers)
        if self.config.partition != "dynamic" and earlier_workers != config.workers:
            raise UsageError(
                f"With --partition {self.config.partition} every worker has its own part of the data, so the run can only be"
                f" resumed with {earlier_workers} workers, not {config.workers}."
            )
        gossip = self.algorithm.gossip
        self.recording = Recording(previous, config.workers, lockstep=self.algorithm.together, gossip=gossip)
        self.checkpointer = (
            Checkpointer(out / "checkpoint", config.checkpoint_every_s, self.earlier.checkpoint)
            if out is not None
            else None
        )
        self.supervisor: Supervisor = None  # type: ignore[assignment]  # until the run begins
        self.last_progress_s = -math.inf
        self.next_evaluation_samples = self.recording.samples + self._evaluate_every
        self.initial_loss = self._initial_loss(train_set, previous)
        self.target_loss = self.config.loss_to_reach(self.initial_loss)

    def _check_same_delay(self, previous: RunData) -> None:
        """Gradients that wait are in the checkpoint, so a run goes on with the delay that it had."""
        for name in ("inject_staleness", "staleness_ramp_epochs"):
            before, now = previous.config.get(name), getattr(self.config, name)
            if before != now:
                raise UsageError(
                    f"The run was started with {name} {before}, and can only be resumed with that, not {now}."
                )

    def _check_same_rule(self, previous: RunData) -> None:
        """The state of the servers' rule is in the checkpoint, and no other rule's."""
        if previous.config.get("algorithm") is None:
            return
        earlier = parse(previous.config["algorithm"])
        before, now = _innermost(earlier.server_rule), _innermost(self.algorithm.server_rule)
        if before is not None and now is not None and type(before) is not type(now):
            raise UsageError(
                f"The run's servers applied gradients by {apply_registry.spec(before)}, whose state is in the checkpoint: it"
                f" cannot be resumed with {apply_registry.spec(now)}."
            )

    @property
    def _rate(self) -> float:
        assert self.config.learning_rate is not None
        return self.config.learning_rate

    @property
    def _evaluate_every(self) -> int:
        """Samples between two evaluations: an epoch, or a quarter of one where the accuracy decides when to stop."""
        return max(1, self.plan.num_samples // (4 if self.config.target_accuracy is not None else 1))

    def _plan(self, train_set: Dataset[Any]) -> BatchPlan:
        partition: Partition = partition_registry.build(self.config.partition)
        assert self.config.batch_size is not None
        return BatchPlan(
            num_samples=len(train_set),  # type: ignore[arg-type]
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            partition=partition,
            num_workers=self.config.workers,
            labels=targets_of(train_set) if isinstance(partition, Skewed) else None,
        )

    def _initial_loss(self, train_set: Dataset[Any], previous: RunData) -> float | None:
        """Training loss before the first update: what `time_to_fraction_s` counts from; kept by a resumed run."""
        if "initial_loss" in previous.result:
            return previous.result["initial_loss"]
        some = range(0, self.plan.num_samples, -(-self.plan.num_samples // _INITIAL_SAMPLES))
        return self.evaluator.initial_loss(train_set, list(some))

    # The run

    def run(self) -> RunData:
        try:
            return self._run()
        except BaseException:
            if self.out is not None and not self._has_begun:
                forget(self.out, self.earlier)
            raise

    def _run(self) -> RunData:
        if self.out is not None:
            write_json(self.out / "config.json", self._config_record())
            self.earlier.keep(self.out)
        self.supervisor = self._make_supervisor()
        self.supervisor.outcome.notes += self.earlier.notes
        with noted() as interruption:
            try:
                self.supervisor.run()
            except KeyboardInterrupt:
                if self._has_begun:
                    self.supervisor.outcome.interrupt(interruption.name)
                    self._finish()
                raise
            finally:
                self.evaluator.finish()
            if self.supervisor.outcome.kind == "usage":
                raise UsageError(self.supervisor.outcome.reason)
            return self._finish()

    @property
    def _has_begun(self) -> bool:
        return self.supervisor is not None and self.supervisor.started_s is not None

    def _make_supervisor(self) -> Supervisor:
        saved = self.earlier.saved
        return Supervisor(
            TaskWorker(dataclasses.replace(self.config, algorithm=spec(self.algorithm)), self.plan, self.train_set),
            num_workers=self.config.workers,
            algorithm=self.algorithm,
            environment=WorkerEnvironment(
                worker_id=0,
                num_workers=self.config.workers,
                incarnation=0,
                algorithm=None,
                seed=self.config.seed,
                connection=None,
                checkpoint=self.out / "checkpoint" if self.out is not None else None,
                resume=self.earlier.checkpoint,
                placement=self.config.placement,
                optimizer_state=self.config.optimizer_state,
                options={
                    "intra_op_threads": self.config.intra_op_threads,
                    "slow": self.config.slow or {},
                    "batches_done": self.earlier.batches_done,
                    "pin": placement_registry.build(self.config.placement).pin,
                },
            ),
            backend=self.config.backend,
            restarts=self.config.restarts,
            folder=self.out,
            on_tick=self._tick,
            handles=(self.dataset_segment.fd,) if self.dataset_segment is not None else (),
            first_batch=saved.next_batch if saved is not None else 0,
            first_version=saved.version if saved is not None else 0,
        )

    def _tick(self, supervisor: Supervisor) -> None:
        self.recording.take(supervisor)
        elapsed_s, loss = self.recording.elapsed_s(supervisor), self.recording.loss
        target, limit_s = self.target_loss, self.config.limit_s
        if target is not None and loss is not None and self.recording.window_full and loss <= target:
            supervisor.stop()
        if limit_s is not None and elapsed_s >= limit_s:
            supervisor.stop()
        self._evaluate(supervisor, elapsed_s, loss)
        if self.checkpointer is not None:
            self.checkpointer.tick(supervisor, elapsed_s, self._epochs_done, self._about_checkpoint)
        if self.on_progress is not None and elapsed_s - self.last_progress_s >= _PROGRESS_EVERY_S:
            self.last_progress_s = elapsed_s
            share = self._share_done(supervisor)
            self.on_progress(self.recording.progress(supervisor, share_done=share, epoch=int(self._epochs_done)))

    def _evaluate(self, supervisor: Supervisor, elapsed_s: float, loss: float | None) -> None:
        finished = self.evaluator.collect()
        if finished is not None:
            self.recording.evaluations.append(finished)
            accuracy, target = finished["test_accuracy"], self.config.target_accuracy
            if target is not None and accuracy is not None and accuracy >= target:
                supervisor.stop()
        samples = self.recording.samples
        if samples >= self.next_evaluation_samples and not self.evaluator.busy:
            self.next_evaluation_samples = (samples // self._evaluate_every + 1) * self._evaluate_every
            assert supervisor.arena is not None
            self.evaluator.start(supervisor.arena, {"elapsed_s": elapsed_s, "samples": samples, "train_loss": loss})

    def _about_checkpoint(self, number: int) -> dict[str, Any]:
        recording, supervisor = self.recording, self.supervisor
        epochs, batches = divmod(number, self.plan.batches_per_epoch)
        return {
            "samples": min(recording.samples, epochs * self.plan.num_samples + batches * self.plan.batch_size),
            "elapsed_s": recording.elapsed_s(supervisor),
            "started_s": (supervisor.started_s or 0.0) - recording.elapsed_before_s,
            "initial_loss": self.initial_loss,
            "batches_missed": recording.batches_missed,
        }

    @property
    def _epochs_done(self) -> float:
        return self.recording.samples / self.plan.num_samples

    def _share_done(self, supervisor: Supervisor) -> float:
        if self.config.steps is not None:
            return min(1.0, sum(supervisor.spool.totals) / (self.config.steps * self.config.workers))
        assert self.config.epochs is not None
        return min(1.0, self._epochs_done / self.config.epochs)

    # The end

    def _finish(self) -> RunData:
        supervisor, recording, outcome = self.supervisor, self.recording, self.supervisor.outcome
        recorded, own, not_saved = recording.records(supervisor), None, None
        records = recording.decided(supervisor, recorded)
        if supervisor.arena is not None and supervisor.started_s is not None:
            if not outcome.interrupted:  # whoever ended it may not wait for long
                samples = sum(int(rows["samples"][rows["applied_version"] >= 1].sum()) for rows in records.values())
                about = {"elapsed_s": last_s(records), "samples": samples, "train_loss": recording.loss}
                final = self.evaluator.now(supervisor.arena, about)
                recording.evaluations.append(final)
                own = self.evaluator.own_models(supervisor.arena, final)
                if outcome.name == "stopped" and not self.evaluator.finite:
                    outcome.name, outcome.reason = (
                        "diverged",
                        f"The parameters are not finite at version {final['version']}.",
                    )
            in_order = ended_in_order(supervisor.workers, outcome)
            if self.checkpointer is not None and outcome.name == "stopped" and in_order:
                try:
                    self._save_end(supervisor)
                except NotWrittenError as error:
                    not_saved = error
        about = {
            key: getattr(self.config, key) for key in ("task", "algorithm", "workers", "backend", "seed", "batch_size")
        }
        about |= injected(self.config, self.algorithm) | about_evaluated(self.algorithm)
        about |= {"num_parameters": self.evaluator.num_parameters, "command": self.command}
        result = recording.result(
            supervisor,
            records,
            recorded,
            about=about,
            initial_loss=self.initial_loss,
            target_loss=self.target_loss,
            target_accuracy=self.config.target_accuracy,
        )
        if own is not None:
            result |= own
        run = RunData(self._config_record(), result, records, recording.evaluations)
        if self.out is not None:
            title = f"{self.config.task}: {self.config.algorithm}"
            write_run(run, self.out, recorded=recorded, title=title, command=self.command)
            supervisor.spool.remove()
        if not_saved is not None:
            not_saved.run = run
            raise not_saved
        return run

    def _save_end(self, supervisor: Supervisor) -> None:
        assert supervisor.arena is not None
        assert self.checkpointer is not None
        next_batch = supervisor.arena.load("next_batch")
        if self.config.epochs is not None:  # each worker claimed one more than there was, and so learnt of the end
            next_batch = min(next_batch, self.plan.num_batches_for(self.config.epochs))
        self.checkpointer.end(supervisor, supervisor.parameters(next_batch), self._about_checkpoint)

    def _config_record(self) -> dict[str, Any]:
        record = dataclasses.asdict(self.config)
        record["data"] = os.fspath(self.config.data) if self.config.data is not None else None
        return record


def _innermost(rule: ApplyRule | None) -> ApplyRule | None:
    while isinstance(rule, Delayed):
        rule = rule.rule
    return rule
