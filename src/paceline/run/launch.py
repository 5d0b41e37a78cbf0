"""`launch`: runs a training function in several workers on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.algorithms import Algorithm, registry
from paceline.errors import NotWrittenError, PacelineError, UsageError, WorkerLostError
from paceline.evaluation.goal import Goal
from paceline.membership.environment import WorkerEnvironment
from paceline.memory.placement import placement_registry
from paceline.observe.progress import Progress
from paceline.observe.written import write_run
from paceline.records.run_data import RunData, write_json
from paceline.replica.slowness import checked_factors
from paceline.run.earlier_part import EarlierPart, forget
from paceline.run.goal_watcher import Judge
from paceline.run.recording import Recording
from paceline.specs.bounds import check_run
from paceline.storage.held_folder import run_folder
from paceline.supervisor.checkpointer import Checkpointer
from paceline.supervisor.supervisor import Supervisor
from paceline.system.interrupts import noted
from paceline.worker.chosen_algorithm import given_algorithm
from paceline.worker.supervised import check_launch, ended_in_order

__all__ = ["launch", "raise_failure"]


def launch(
    train: Callable[[], Any],
    *,
    workers: int,
    algorithm: Algorithm | str | None = None,
    backend: str = "processes",
    seed: int = 0,
    restarts: int = 0,
    placement: str = "first-touch",
    intra_op_threads: int = 1,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    checkpoint_every_s: float = 10.0,
    target_loss: float | None = None,
    target_accuracy: float | None = None,
    limit_s: float | None = None,
    limit_samples: int | None = None,
    evaluate_every_samples: int | None = None,
    slow: Mapping[int, float] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunData:
    """Calls `train()` in every worker; inside, `attach` makes them one run.

    Worker processes come from a fork server that has PyTorch and the kernels loaded; the first launch of a program starts it.
    A worker that dies is noticed at once: the others go on where the algorithm can.

    Args:
        train: a function at the top level of a module (any callable with `backend="threads"`). Seeds are its own business:
            the first worker to attach gives all of them its initial parameters. What it returns is not passed on; let it save
            what is wanted, or read it from the checkpoint in `out`.
        workers: how many.
        algorithm: a spec or an instance; None where `attach` names it.
        backend: "processes" or "threads".
        seed: of the order of samples in `worker.batches`, and of everything random in the algorithm.
        restarts: how many dead workers are replaced by new processes.
        placement: spec of where the shared parameters lie.
        intra_op_threads: threads per worker inside one PyTorch operation.
        out: folder for events, result, trace, report and checkpoints; None: nothing is written.
        resume: folder of a run to go on with from its newest checkpoint; epochs that are done are skipped by
            `worker.batches`.
        checkpoint_every_s: at most one checkpoint in this time, at the beginning of an epoch; 0: at every epoch.
        target_loss: stop once the mean of the last 100 losses of applied gradients that `worker.report` told is at most this.
        target_accuracy: instead: stop once the `evaluate` that `attach` was given finds at least this.
        limit_s: stop after so many seconds of training.
        limit_samples: stop after so many samples of applied gradients.
        evaluate_every_samples: call `evaluate` so often, unless it is still at it; None: every quarter of an epoch with a
            target accuracy, else every epoch (10,000 samples where `worker.batches` cannot know how long one is).
        slow: by worker, how many times as long its gradients take: it sleeps the rest of that time before it goes on.
        on_progress: called at every look at the workers, about 20 times a second.

    A run that is stopped hands out no more batches, so that its loops end by themselves; whoever waits for others then goes on
    after its `with`. Evaluations are made by a process of their own beside worker 0's, and end with that.

    Ctrl-C, and SIGTERM where the program leaves that to the system, stop it likewise: parameters, records and result are
    written, and then the signal takes its course.

    Returns:
        The run: records, evaluations, and `result` with outcome `converged`, `stopped` or `diverged`.

    Raises:
        UsageError: something cannot be launched as asked, or another process writes the folder.
        NotWrittenError: the disk did not take a file; the error's `run` is what was measured, if the run has ended.
        WorkerLostError: a worker died that the algorithm cannot go on without.
        PacelineError: a worker's function raised an exception, whose traceback is in the message; all workers have died; or
            none has made an update.
    """
    named = given_algorithm(algorithm)
    servers = named.memory.server_programs if named is not None else 0
    check_launch(num_workers=workers, backend=backend, placement=placement, num_servers=servers)
    check_run(
        {
            "seed": seed,
            "restarts": restarts,
            "intra_op_threads": intra_op_threads,
            "checkpoint_every_s": checkpoint_every_s,
        }
    )
    factors = checked_factors(slow, workers)
    goal = Goal(
        target_loss=target_loss,
        target_accuracy=target_accuracy,
        limit_s=limit_s,
        limit_samples=limit_samples,
        evaluate_every_samples=evaluate_every_samples,
    )
    folder = Path(out) if out is not None else Path(resume) if resume is not None else None
    config = {"workers": workers, "backend": backend, "seed": seed, "placement": placement} | dataclasses.asdict(goal)
    environment = WorkerEnvironment(
        worker_id=0,
        num_workers=workers,
        incarnation=0,
        algorithm=None,
        seed=seed,
        connection=None,
        checkpoint=folder / "checkpoint" if folder is not None else None,
        placement=placement,
        options={
            "intra_op_threads": intra_op_threads,
            "pin": placement_registry.build(placement).pin,
            "goal": goal if goal.any or folder is not None else None,
            "slow": factors,
        },
    )
    with run_folder(folder, Path(resume) if resume is not None else None):
        earlier = EarlierPart.of(Path(resume) if resume is not None else None)
        launched = _Launched(
            train,
            Recording(earlier.run, workers, lockstep=False),
            goal,
            earlier,
            folder,
            {**config, "slow": factors or None},
            on_progress,
        )
        options = {**environment.options, "batches_done": earlier.batches_done, "done_before": earlier.done_before}
        environment = replace(environment, resume=earlier.checkpoint, options=options)
        return launched.run(named, environment, restarts, checkpoint_every_s)


class _Launched:
    """One call of `launch`, once its arguments have been found right."""

    def __init__(
        self,
        train: Callable[[], Any],
        recording: Recording,
        goal: Goal,
        earlier: EarlierPart,
        folder: Path | None,
        config: dict[str, Any],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._train = train
        self._recording = recording
        self._goal = goal
        self._earlier = earlier
        self._folder = folder
        self._config = config
        self._on_progress = on_progress
        self._judge = Judge(goal, recording)
        self._checkpointer: Checkpointer | None = None
        self._supervisor: Supervisor | None = None

    def run(
        self, algorithm: Algorithm | None, environment: WorkerEnvironment, restarts: int, checkpoint_every_s: float
    ) -> RunData:
        try:
            if self._folder is not None:
                write_json(self._folder / "config.json", self._config)
                self._earlier.keep(self._folder)
                self._checkpointer = Checkpointer(
                    self._folder / "checkpoint", checkpoint_every_s, self._earlier.checkpoint
                )
            saved = self._earlier.saved
            self._supervisor = supervisor = Supervisor(
                self._train,
                num_workers=self._config["workers"],
                algorithm=algorithm,
                environment=environment,
                backend=self._config["backend"],
                restarts=restarts,
                folder=self._folder,
                on_tick=self._tick,
                on_end=self._end,
                first_batch=saved.next_batch if saved is not None else 0,
                first_version=saved.version if saved is not None else 0,
            )
            supervisor.outcome.notes += self._earlier.notes
            with noted() as interruption:
                try:
                    supervisor.run()
                except KeyboardInterrupt:
                    if supervisor.started_s is not None:
                        supervisor.outcome.interrupt(interruption.name)
                        self._finish(supervisor)
                    raise
                finally:
                    self._judge.close()
                if supervisor.started_s is None:  # there is no run yet: its folder is left as it was
                    raise_failure(supervisor)
                if supervisor.arena is None and supervisor.all_returned:
                    raise UsageError(f"{self._name} never called paceline.attach, so its workers shared nothing.")
                return self._finish(supervisor)
        except BaseException:
            if self._folder is not None and (self._supervisor is None or self._supervisor.started_s is None):
                forget(self._folder, self._earlier)
            raise

    @property
    def _name(self) -> str:
        return getattr(self._train, "__name__", "train")

    def _about_checkpoint(self, number: int) -> dict[str, Any]:
        recording, supervisor = self._recording, self._supervisor
        assert supervisor is not None
        return {
            "samples": recording.samples,
            "elapsed_s": recording.elapsed_s(supervisor),
            "started_s": (supervisor.started_s or 0.0) - recording.elapsed_before_s,
            "initial_loss": None,
            "batches_missed": recording.batches_missed,
        }

    def _tick(self, supervisor: Supervisor) -> None:
        recording = self._recording
        _learn_algorithm(recording, supervisor)
        recording.take(supervisor)
        self._judge.tick(supervisor)
        if self._checkpointer is not None:
            assert supervisor.arena is not None
            epochs_done = float(supervisor.arena.load("epoch"))
            self._checkpointer.tick(supervisor, recording.elapsed_s(supervisor), epochs_done, self._about_checkpoint)
        if self._on_progress is not None:
            share = self._judge.share_done(recording.elapsed_s(supervisor))
            self._on_progress(recording.progress(supervisor, share_done=share, epoch=None))

    def _end(self, supervisor: Supervisor) -> None:
        self._recording.take(supervisor)
        self._judge.end(supervisor)
        self._judge.close()

    def _finish(self, supervisor: Supervisor) -> RunData:
        """Writes what has come of it; raises what ended it as `crashed`."""
        recording, folder = self._recording, self._folder
        _learn_algorithm(recording, supervisor)
        recorded = recording.records(supervisor)
        records = recording.decided(supervisor, recorded)
        about = {
            "task": self._name,
            "algorithm": registry.spec(supervisor.algorithm) if supervisor.algorithm is not None else None,
            "workers": self._config["workers"],
            "backend": self._config["backend"],
            "seed": self._config["seed"],
            "command": " ".join(sys.argv),
        }
        not_written = self._save_end(supervisor, records)
        goal = self._goal
        result = recording.result(
            supervisor,
            records,
            recorded,
            about=about,
            target_loss=goal.target_loss,
            target_accuracy=goal.target_accuracy,
        )
        if supervisor.algorithm is not None and supervisor.algorithm.gossip and supervisor.arena is not None:
            result["consensus_distance"] = supervisor.arena.shared.consensus_distance(supervisor.parameters(0).x)
        run = RunData({**self._config, **about}, result, records, recording.evaluations)
        if folder is not None:
            title = f"{about['task']}: {about['algorithm']}"
            try:
                write_run(run, folder, recorded=recorded, title=title, command=about["command"])
                supervisor.spool.remove()
            except NotWrittenError as error:
                not_written = error
        raise_failure(supervisor)
        if not_written is not None:
            not_written.run = run
            raise not_written
        return run

    def _save_end(self, supervisor: Supervisor, records: Mapping[int, np.ndarray]) -> NotWrittenError | None:
        """Writes the last checkpoint of a run that has ended in order; returns why that could not be."""
        outcome = supervisor.outcome
        in_order = outcome.name == "stopped" and ended_in_order(supervisor.workers, outcome)
        if self._checkpointer is None or supervisor.arena is None or not in_order:
            return None
        last_batch = max((int(rows["batch"].max()) for rows in records.values() if len(rows)), default=-1)
        kept = supervisor.arena.epoch_claims().least_kept()
        parameters = supervisor.parameters(last_batch + 1 if kept is None else min(kept, last_batch + 1))
        try:
            self._checkpointer.end(supervisor, parameters, self._about_checkpoint)
        except NotWrittenError as error:
            return error
        return None


def _learn_algorithm(recording: Recording, supervisor: Supervisor) -> None:
    """The algorithm is known once the first worker has attached, which may have named it."""
    if supervisor.algorithm is not None:
        recording.gossip = supervisor.algorithm.gossip
        recording.lockstep = supervisor.algorithm.together


def raise_failure(supervisor: Supervisor) -> None:
    """Raises what ended a run as `crashed`, in the caller."""
    outcome = supervisor.outcome
    if outcome.name != "crashed":
        return
    if outcome.kind == "usage":
        raise UsageError(outcome.reason)
    if outcome.kind == "worker-lost":
        raise WorkerLostError(outcome.reason)
    raise PacelineError(outcome.reason + (f"\n\n{outcome.trace}" if outcome.trace else ""))
