"""A run of real workers, from its folder's first file to its last: goals, evaluations, checkpoints, the end."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import NotWrittenError, PacelineError, UsageError, WorkerLostError
from paceline.observe.progress import Progress
from paceline.observe.report import write_run
from paceline.records import checkpoint_contents, checkpoint_files
from paceline.records.run_data import RunData, write_config
from paceline.run.checkpointer import NO_LAST_STEP, Checkpointer
from paceline.run.earlier_part import EarlierPart, forget
from paceline.run.goal_watcher import GoalWatcher
from paceline.run.loops import Loop
from paceline.run.recording import Recording
from paceline.run.replayable import Resumption, replayability
from paceline.run.supervisor import Supervisor
from paceline.system.interrupts import noted
from paceline.worker.supervised import ended_in_order, survivors


class Driver:
    """One run of a loop, ready to begin. Raises a crash of a user's loop; a task's run is returned as crashed."""

    def __init__(
        self,
        loop: Loop,
        folder: Path | None,  # the run's, locked by the caller; None: nothing is written
        earlier: EarlierPart,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        progress_every_s: float = 0.0,  # shortest time between two calls; 0: at every check of the workers
    ) -> None:
        self.progress_every_s = progress_every_s
        self._loop = loop
        self._folder = folder
        self._earlier = earlier
        self._run_id = (earlier.run_id if earlier.is_in(folder) else "") or secrets.token_hex(8)
        self._on_progress = on_progress
        self._last_progress_s = -math.inf
        self._checkpointer: Checkpointer | None = None
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None
        return self._supervisor

    def warn(self) -> None:
        if self._loop.algorithm is not None:
            self._loop.algorithm.warn(self._loop.config.workers, stacklevel=4)

    def run(self) -> RunData:
        """Returns when all has ended and is written; call it once.

        Raises:
            KeyboardInterrupt: a signal has ended the run; its measurements are written.
            NotWrittenError: a file could not be written; the error's `run` has the measurements, if the run has ended.
            PacelineError: a user's function failed, or its workers died; UsageError: the loop cannot be run.
        """
        try:
            return self._run()
        except BaseException as error:
            keep = self._has_stepped if isinstance(error, UsageError) else self._has_begun
            if self._folder is not None and not keep:
                forget(self._folder, self._earlier)
            raise

    @property
    def _has_begun(self) -> bool:
        return self._supervisor is not None and self._supervisor.started_s is not None

    @property
    def _has_stepped(self) -> bool:
        return self._supervisor is not None and any(self._supervisor.spool.totals)

    def _run(self) -> RunData:
        loop, folder = self._loop, self._folder
        if folder is not None:
            every_s, resumed = loop.config.checkpoint_every_s, self._earlier.checkpoint
            self._checkpointer = Checkpointer(folder / "checkpoint", every_s, resumed)
            write_config(folder, self._record())
            self._earlier.keep(folder)
        resumption = self._resumption()  # now, as the checkpoint may be gone in the end
        supervisor = Supervisor(loop, folder, self._earlier, on_tick=self._tick, on_end=self._end)
        self._supervisor = supervisor
        supervisor.outcome.notes += self._earlier.notes
        self._recording = Recording(self._earlier.run, supervisor)
        self._watcher = GoalWatcher(self._recording, loop.task.evaluator if loop.task is not None else None)
        with noted() as interruption:
            try:
                supervisor.run()
            except KeyboardInterrupt:
                if self._has_begun:
                    supervisor.outcome.interrupt(interruption.name)
                    self._finish(resumption)
                raise
            finally:
                self._watcher.close()
            if supervisor.outcome.kind == "usage" and (loop.task is not None or not self._has_stepped):
                raise UsageError(supervisor.outcome.reason)
            if loop.task is None and not self._has_begun:  # there is no run yet: leave its folder unchanged
                _raise_crash(supervisor)
            if supervisor.arena is None and all(one.ended and one.failure is None for one in supervisor.workers):
                raise UsageError(f"{loop.config.task} never called paceline.attach, so its workers shared nothing.")
            return self._finish(resumption)

    def _tick(self, supervisor: Supervisor) -> None:
        recording = self._recording
        recording.take()
        self._watcher.tick()
        elapsed_s = recording.elapsed_s()
        if self._checkpointer is not None:
            self._checkpointer.tick(supervisor, elapsed_s, recording.epochs_done(), self._about_checkpoint)
        if self._on_progress is not None and elapsed_s - self._last_progress_s >= self.progress_every_s:
            self._last_progress_s = elapsed_s
            self._on_progress(recording.progress())

    def _end(self, supervisor: Supervisor) -> None:
        self._recording.take()
        self._watcher.end()
        self._watcher.close()

    def _record(self) -> dict[str, Any]:
        return self._loop.record() | ({"run_id": self._run_id} if self._folder is not None else {})

    def _about_checkpoint(self, number: int, workers: list[int]) -> dict[str, Any]:
        recording = self._recording
        assert self._folder is not None
        return {
            "run_id": self._run_id,
            **recording.of_events(self._folder / "checkpoint" / str(number), workers),
            "records_lost": self._earlier.run.result.get("records_lost", 0) + recording.unrecorded_rounds(),
            "samples": recording.samples_at(number),
            "elapsed_s": recording.elapsed_s(),
            "started_s": (self.supervisor.started_s or 0.0) - recording.elapsed_before_s,
            "initial_loss": recording.initial_loss,
            "batches_missed": recording.batches_missed,
            "since": self._earlier.since,
            "algorithm": self._loop.about(self.supervisor.algorithm)["algorithm"],
        }

    # The end

    def _finish(self, resumed: dict[str, Any]) -> RunData:
        loop, supervisor, recording = self._loop, self.supervisor, self._recording
        recording.take()  # the workers' last records
        recorded = recording.records()
        records = recording.decided(recorded)
        not_written = self._save_end(recorded)
        about = loop.about(supervisor.algorithm)
        result = recording.result(
            records,
            recorded,
            about=about,
            worst_worker_accuracy=self._watcher.worst_worker_accuracy,
        )
        config = self._record() | (about if loop.task is None else {})
        result |= resumed
        if supervisor.arena is not None and supervisor.arena.plan.sharding is not None:
            result["waits_for"] = None  # within groups, too
        run = RunData(config, result, records, recording.evaluations, order=supervisor.spool.order())
        run.result |= replayability(run)
        if self._folder is not None:
            title = f"{about['task']}: {about['algorithm']}"
            try:
                write_run(run, self._folder, recorded=recorded, title=title, command=loop.command)
                supervisor.spool.remove()
            except NotWrittenError as error:
                not_written = error
        if loop.task is None:
            _raise_crash(supervisor)
        if not_written is not None:
            not_written.run = run
            raise not_written
        return run

    def _resumption(self) -> dict[str, Any]:
        """What the result says of the checkpoint with which the run was resumed; for replays."""
        checkpoint, folder = self._earlier.checkpoint, self._folder
        if checkpoint is None or folder is None or self._loop.plan is not None:
            return {}
        checkpoint = checkpoint.resolve()
        is_own = self._earlier.is_in(folder)
        events = {worker: len(rows) for worker, rows in self._earlier.run.records.items()}
        path = checkpoint.relative_to(folder.resolve()) if is_own else checkpoint
        versions = checkpoint_contents.versions(checkpoint, checkpoint_files.describe(checkpoint)["workers"])
        return {"resumed": Resumption(str(path), events, *versions).as_json()}

    def _save_end(self, records: Mapping[int, np.ndarray]) -> NotWrittenError | None:
        """Writes the last checkpoint of a run that has ended cleanly or lost a worker; returns the error if that fails."""
        supervisor, outcome = self.supervisor, self.supervisor.outcome
        if self._checkpointer is None or supervisor.arena is None:
            return None
        survivor = self._survivor()
        if survivor is None and outcome.name != "stopped":
            return None
        if survivor is None and not ended_in_order(supervisor.workers, outcome):
            outcome.notes.append(NO_LAST_STEP)
            return None
        parameters = supervisor.parameters(self._recording.next_batch(supervisor.arena, records), survivor)
        try:
            self._checkpointer.end(supervisor, parameters, self._about_checkpoint)
        except NotWrittenError as error:
            return error
        return None

    def _survivor(self) -> int | None:
        """A worker that has all of a run that ended as another one died or failed; None: it did not end so, or none has."""
        algorithm, outcome = self.supervisor.algorithm, self.supervisor.outcome
        if algorithm is None or not algorithm.survivors_have_all or outcome.kind not in ("worker-lost", "error"):
            return None
        return next(iter(survivors(self.supervisor.workers)), None)


def _raise_crash(supervisor: Supervisor) -> None:
    outcome = supervisor.outcome
    if outcome.name != "crashed":
        return
    if outcome.kind == "usage":
        raise UsageError(outcome.reason)
    if outcome.kind == "worker-lost":
        raise WorkerLostError(outcome.reason)
    raise PacelineError(outcome.reason + (f"\n\n{outcome.trace}" if outcome.trace else ""))
