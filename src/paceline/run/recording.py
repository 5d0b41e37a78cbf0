"""A supervisor's account of a run: running totals from the workers' records, and the final records and result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.memory.arena import Arena
from paceline.observe.progress import Progress, WorkerProgress
from paceline.records import checkpoint_contents as checkpoint
from paceline.records.event_counts import EventCounts
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE, last_s, shift_times, without_waiting
from paceline.records.summary import repeated_batches
from paceline.run.run_record import RunRecord
from paceline.run.supervisor import Supervisor
from paceline.system.machine import machine, versions
from paceline.worker.supervised import survivors


class Recording(RunRecord):
    """Running totals of a run, and its records on the run's own time.

    Attributes:
        batches_missed: batches that resuming skips: handed out before the checkpoint, with updates after it.
    """

    def __init__(self, previous: RunData, supervisor: Supervisor) -> None:
        loop = supervisor.loop
        initial_loss = loop.task.initial_loss if loop.task is not None else None
        super().__init__(
            loop.goal, initial_loss, samples=previous.result.get("samples", 0), evaluations=previous.evaluations
        )
        self._config, self._task = loop.config, loop.task
        self.previous = previous  # what an earlier part of the run recorded; a resumed run continues counting from it
        self.supervisor = supervisor
        self.batches_missed: int = previous.result.get("batches_missed", 0)
        self.elapsed_before_s: float = previous.result.get("wall_s", 0.0)
        self._num_notes = 0
        self._share_before: float | None = None if previous.result else 0.0
        self._last_rows: list[np.ndarray] = [np.empty(0, RECORD_DTYPE)] * supervisor.num_workers

    @property
    def gossip(self) -> bool:
        """Whether every worker has its own model, and so its own versions; known once the first worker has attached."""
        return self.supervisor.algorithm is not None and self.supervisor.algorithm.gossip

    def elapsed_s(self) -> float:
        """Time trained so far, earlier parts of the run included."""
        assert self.supervisor.started_s is not None
        return self.elapsed_before_s + time.monotonic() - self.supervisor.started_s

    def epochs_done(self) -> float:
        if self._task is not None:
            return self.samples / self._task.plan.num_samples
        arena = self.supervisor.arena
        return float(arena.load("epoch")) if arena is not None else 0.0

    def _share_done(self) -> float:
        config = self._config
        if config.steps is not None:
            return min(1.0, sum(self.supervisor.spool.totals) / (config.steps * config.workers))
        if config.epochs is not None:
            return min(1.0, self.epochs_done() / config.epochs)
        return self.goal.share_done(self.elapsed_s(), self.samples)

    def samples_at(self, batch: int) -> int:
        """The number of samples trained on before this batch."""
        if self._task is None:
            return self.samples
        plan = self._task.plan
        epochs, batches = divmod(batch, plan.batches_per_epoch)
        return min(self.samples, epochs * plan.num_samples + batches * plan.batch_size)

    def next_batch(self, arena: Arena, records: Mapping[int, np.ndarray]) -> int:
        """The first batch of a run that resumes from the end of this one."""
        kept = arena.epoch_claims().least_kept()  # the first that was claimed but not trained on
        algorithm = self.supervisor.algorithm
        if self._task is None or (algorithm is not None and algorithm.lockstep):  # rounds claim nothing
            end = 1 + max((int(rows["batch"].max()) for rows in records.values() if len(rows)), default=-1)
        else:
            end = arena.load("next_batch")
            if self._config.epochs is not None:  # each claimed one too many
                end = min(end, self._task.plan.num_batches_for(self._config.epochs))
        return end if kept is None else min(kept, end)

    def take(self) -> None:
        """Counts the records of the supervisor's last drain."""
        supervisor = self.supervisor
        fresh = np.concatenate(supervisor.spool.fresh)
        applied = fresh[fresh["applied_version"] >= 1]
        self.samples += int(applied["samples"].sum())
        order = "ended_s" if self.gossip else "applied_version"
        losses = applied["loss"][np.argsort(applied[order], kind="stable")]
        self._losses.extend(losses[~np.isnan(losses)].tolist())
        for worker, rows in enumerate(supervisor.spool.fresh):
            if len(rows):
                self._last_rows[worker] = rows
                if supervisor.spool.folder is not None:
                    self._event_counts.take(worker, self._on_own_time(rows.copy()))

    def of_events(self, path: Path, workers: list[int]) -> dict[str, Any]:
        """Counts and fingerprints of the events that these workers' checkpoint in `path` contains."""
        version, own = checkpoint.versions(path, workers)
        counts = self._event_counts
        return {"waits": counts.waits, "events": counts.up_to(lambda worker: own.get(worker, version))}

    @cached_property
    def _event_counts(self) -> EventCounts:
        """Made when the first events come: then the algorithm is known."""
        algorithm = self.supervisor.algorithm
        waits = algorithm is not None and algorithm.lets_gradients_wait
        return EventCounts(self.previous.records, waits=waits)

    def _on_own_time(self, rows: np.ndarray) -> np.ndarray:
        """The same records with times from the run's start."""
        shift_times(rows, self.elapsed_before_s - (self.supervisor.started_s or 0.0))
        return rows

    def progress(self) -> Progress:
        supervisor = self.supervisor
        assert supervisor.arena is not None
        elapsed_s, share_done = self.elapsed_s(), self._share_done()
        running_s = max(elapsed_s - self.elapsed_before_s, 1e-9)
        if self._share_before is None:
            self._share_before = share_done  # a resumed run has done this much before
        newly_done = share_done - self._share_before
        workers = []
        for state, rows in zip(supervisor.workers, self._last_rows, strict=True):
            steps_s = float((rows["ended_s"] - rows["started_s"]).sum())
            applied = rows[rows["applied_version"] >= 1]
            stale = applied["applied_version"] - 1 - applied["read_version"]
            total = supervisor.spool.totals[state.worker_id]
            workers.append(
                WorkerProgress(
                    worker_id=state.worker_id,
                    alive=not state.lost,
                    steps=total,
                    steps_per_s=total / running_s,
                    mean_staleness=float(stale.mean()) if len(stale) else 0.0,
                    waiting_share=float(rows["wait_s"].sum()) / steps_s if steps_s else 0.0,
                )
            )
        return Progress(
            elapsed_s=elapsed_s,
            share_done=share_done,
            remaining_s=running_s * (1 - share_done) / newly_done if newly_done > 0 else None,
            version=supervisor.arena.shared.version,
            samples=self.samples,
            samples_per_s=(self.samples - self.previous.result.get("samples", 0)) / running_s,
            loss=self.loss,
            accuracy=self.evaluations[-1]["test_accuracy"] if self.evaluations else None,
            epoch=int(self.epochs_done()) if self._task is not None else None,
            workers=tuple(workers),
            message=self._new_note(supervisor.outcome.notes),
        )

    def _new_note(self, notes: list[str]) -> str | None:
        new, self._num_notes = notes[self._num_notes :], len(notes)
        return " ".join(new) or None

    def records(self) -> dict[int, np.ndarray]:
        """All records of the run as its folder keeps them, times in seconds from its start.

        Waiting gradients have the version that they will make: a run that is resumed from here makes it.
        """
        supervisor = self.supervisor
        records = dict(self.previous.records)  # a resumed run may have fewer workers than before
        for worker, rows in supervisor.spool.records().items():
            before, rows = self.previous.records.get(worker), self._on_own_time(rows)
            records[worker] = np.concatenate([before, rows]) if before is not None else rows
        return records

    def decided(self, records: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The records of an ended run: gradients that still wait count as dropped."""
        arena = self.supervisor.arena
        return records if self.gossip or arena is None else without_waiting(records, arena.shared.version)

    def result(
        self,
        records: Mapping[int, np.ndarray],
        recorded: Mapping[int, np.ndarray],
        *,
        about: Mapping[str, Any],
        worst_worker_accuracy: float | None = None,
    ) -> dict[str, Any]:
        """The content of `result.json`: `recorded` is from `records`, `records` from `decided`."""
        supervisor, outcome, arena = self.supervisor, self.supervisor.outcome, self.supervisor.arena
        own_models: dict[str, float | None] = dict.fromkeys(("consensus_distance", "worst_worker_accuracy"))
        if self.gossip and arena is not None:
            distance = arena.shared.consensus_distance(supervisor.parameters(0).x)
            own_models = {"consensus_distance": distance, "worst_worker_accuracy": worst_worker_accuracy}
        lost, before = self._unrecorded(recorded), self.previous.result
        delay = arena.load("delay") if arena is not None else 0
        result = self.figures(
            records,
            outcome,
            about=about,
            algorithm=supervisor.algorithm,
            num_workers=supervisor.num_workers,
            wall_s=last_s(records),
            shared=arena.shared if arena is not None else None,
            own_models=own_models,
            unresolved_exchanges=arena.load("unresolved_exchanges") if arena is not None else 0,
            delay=delay,
            updates_lost=before.get("updates_lost", 0) + lost,
            records_lost=before.get("records_lost", 0) + lost + self.unrecorded_rounds(),
            has_ended_itself=arena is not None and not arena.is_stopped,
        )
        return {
            **result,
            "torn_updates": outcome.torn_updates,
            "view_changes": outcome.view_changes,
            **served(supervisor),
            "checkpoints_failed": len(outcome.left_out),
            "events_lost": supervisor.spool.lost,
            "batches_repeated": repeated_batches(records),
            "batches_missed": self.batches_missed,
            "ready_after_s": supervisor.ready_after_s,
            "notes": [*outcome.notes, *self._notes(delay)],
            "machine": machine(),
            "versions": versions(),
        }

    def _notes(self, delay: int) -> list[str]:
        """Sentences about what was lost with workers, and about the delay that the programs chose."""
        algorithm, num_workers = self.supervisor.algorithm, self.supervisor.num_workers
        if algorithm is None:
            return []
        lost = algorithm.lost_with(self.supervisor.outcome.workers_lost) if num_workers > 1 else ""
        return [*([lost] if lost else []), *self.choice_notes(algorithm, num_workers, delay)]

    def _unrecorded(self, recorded: Mapping[int, np.ndarray]) -> int:
        """Updates since the run was resumed, if it was, without a record."""
        supervisor = self.supervisor
        arena, algorithm = supervisor.arena, supervisor.algorithm
        if arena is None or algorithm is None:
            return 0
        own = {worker: rows[len(self.previous.records.get(worker, ())) :] for worker, rows in recorded.items()}
        first, undone = arena.load("initial_version"), [lost[1:] for lost in supervisor.servers.lost if lost[0] == 0]
        return self.unrecorded_updates(algorithm, own, arena.shared, first=first, undone=undone)

    def unrecorded_rounds(self) -> int:
        """Missing records of workers that died or failed after a round had its mean: at most one each."""
        algorithm, workers = self.supervisor.algorithm, self.supervisor.workers
        if algorithm is None or not algorithm.survivors_have_all:
            return 0
        failed = {one.worker_id for one in workers} - set(survivors(workers))
        arena, before = self.supervisor.arena, self.previous.records
        rows = {one: new if len(new) else before.get(one, new) for one, new in enumerate(self._last_rows)}
        ends = [(one, arena.shared.last_version_of(one) if arena is not None else None) for one in failed]
        return self.lacking(rows, ends) + (arena.load("unrecorded") if arena is not None else 0)


def served(supervisor: Supervisor) -> dict[str, Any]:
    """The servers' counts; empty without servers."""
    counts = getattr(supervisor.arena.shared, "counts", None) if supervisor.arena is not None else None
    if counts is None or not supervisor.servers.states:
        return {}
    lost = supervisor.servers.lost
    return {
        "shards": counts(),
        "server_restarts": supervisor.servers.restarts,
        "snapshots_failed": supervisor.outcome.snapshots_failed,
        "lost_updates": sum(last - first + 1 for _, first, last in lost),
        "lost_versions": [list(one) for one in lost],
    }
