"""What a supervisor learns from the workers' records while a run goes on, and what is kept of it at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.observe.progress import Progress, WorkerProgress
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE, without_waiting
from paceline.records.summary import NO_UPDATE, WINDOW, repeated_batches, summarize, unrecorded
from paceline.run.earlier_part import shift_times
from paceline.supervisor.supervisor import Supervisor
from paceline.system.machine import machine, versions

__all__ = ["Recording", "last_s"]


class Recording:
    """Running totals of a run, and its records on the run's own time.

    Args:
        previous: what an earlier part of the run recorded; a resumed run goes on counting from it.
        num_workers: workers of the run.
        lockstep: all workers make one update together.
        gossip: every worker has a model, and so versions, of its own.

    Attributes:
        batches_missed: that resuming has left out: their updates came after the checkpoint, and the batches before it.
    """

    def __init__(self, previous: RunData, num_workers: int, *, lockstep: bool, gossip: bool = False) -> None:
        self.previous = previous
        self.evaluations: list[dict[str, Any]] = list(previous.evaluations)
        self.samples: int = previous.result.get("samples", 0)
        self.batches_missed: int = previous.result.get("batches_missed", 0)
        self.elapsed_before_s: float = previous.result.get("wall_s", 0.0)
        self.loss: float | None = None  # mean of the last WINDOW losses, in the order of their updates
        self.window_full = False
        self.lockstep = lockstep
        self.gossip = gossip
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._num_notes = 0
        self._share_before: float | None = None if previous.result else 0.0
        self._last_rows: list[np.ndarray] = [np.empty(0, RECORD_DTYPE)] * num_workers

    def elapsed_s(self, supervisor: Supervisor) -> float:
        """Time trained so far, earlier parts of the run included."""
        assert supervisor.started_s is not None
        return self.elapsed_before_s + time.monotonic() - supervisor.started_s

    def take(self, supervisor: Supervisor) -> None:
        """Counts what the supervisor's last drain brought."""
        fresh = np.concatenate(supervisor.spool.fresh)
        applied = fresh[fresh["applied_version"] >= 1]
        self.samples += int(applied["samples"].sum())
        order = "ended_s" if self.gossip else "applied_version"
        losses = applied["loss"][np.argsort(applied[order], kind="stable")]
        self._recent.extend(losses[~np.isnan(losses)].tolist())
        self.window_full = len(self._recent) == WINDOW
        self.loss = float(np.mean(self._recent)) if self._recent else None
        for worker, rows in enumerate(supervisor.spool.fresh):
            if len(rows):
                self._last_rows[worker] = rows

    def progress(self, supervisor: Supervisor, *, share_done: float, epoch: int | None) -> Progress:
        """What to show now."""
        assert supervisor.arena is not None
        elapsed_s = self.elapsed_s(supervisor)
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
            epoch=epoch,
            workers=tuple(workers),
            message=self._new_note(supervisor.outcome.notes),
        )

    def _new_note(self, notes: list[str]) -> str | None:
        """What happened since the last progress, once."""
        new, self._num_notes = notes[self._num_notes :], len(notes)
        return " ".join(new) or None

    def records(self, supervisor: Supervisor) -> dict[int, np.ndarray]:
        """All records of the run as its folder keeps them, times in seconds from its start.

        Gradients that wait have the version that they will make: a run that is resumed from here makes it.
        """
        records = dict(self.previous.records)  # a resumed run may have fewer workers than before
        for worker, rows in supervisor.spool.records().items():
            shift_times(rows, self.elapsed_before_s - (supervisor.started_s or 0.0))
            before = self.previous.records.get(worker)
            records[worker] = np.concatenate([before, rows]) if before is not None else rows
        return records

    def decided(self, supervisor: Supervisor, records: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The same, as they count now that the run has ended: what still waits is dropped."""
        arena = supervisor.arena
        return records if self.gossip or arena is None else without_waiting(records, arena.shared.version)

    def result(
        self,
        supervisor: Supervisor,
        records: Mapping[int, np.ndarray],
        recorded: Mapping[int, np.ndarray],
        *,
        about: Mapping[str, Any],
        initial_loss: float | None = None,
        target_loss: float | None = None,
        target_accuracy: float | None = None,
    ) -> dict[str, Any]:
        """The content of `result.json`; a run that ended by itself and reached its target is `converged`.

        Args:
            supervisor: after its run.
            records: from `decided`.
            recorded: from `records`.
            about: what identifies the run: task, algorithm, workers, ...
            initial_loss: loss before the first update.
            target_loss: the run's target, if it had one.
            target_accuracy: likewise.
        """
        figures = summarize(
            records,
            num_workers=len(supervisor.workers),
            wall_s=last_s(records),
            initial_loss=initial_loss,
            target_loss=target_loss,
            target_accuracy=target_accuracy,
            evaluations=self.evaluations,
            lockstep=self.lockstep,
            gossip=self.gossip,
        )
        outcome, arena = supervisor.outcome, supervisor.arena
        if outcome.name == "stopped" and figures["time_to_target_s"] is not None:
            outcome.name = "converged"
        records_lost = self._records_lost(supervisor, recorded)
        figures["steps"] += records_lost
        if outcome.name == "stopped" and arena is not None and not (figures["steps"] or arena.load("abort")):
            outcome.name, outcome.kind, outcome.reason = "crashed", "error", NO_UPDATE
        touched = getattr(arena.shared, "touched_slots", None) if arena is not None else None
        return {
            **about,
            "outcome": outcome.name,
            "outcome_reason": outcome.reason,
            "outcome_trace": outcome.trace,
            **figures,
            "gossip": self.gossip,
            "consensus_distance": None,
            "worst_worker_accuracy": None,
            "unresolved_exchanges": arena.load("unresolved_exchanges") if arena is not None else 0,
            "initial_loss": initial_loss,
            "version": arena.shared.version if arena is not None else 0,
            "target_loss": target_loss,
            "target_accuracy": target_accuracy,
            "workers_lost": outcome.workers_lost,
            "torn_updates": outcome.torn_updates,
            "restarts": outcome.restarts,
            **served(supervisor),
            "checkpoints_failed": len(outcome.left_out),
            "events_lost": supervisor.spool.lost,
            "records_lost": records_lost,
            "batches_repeated": repeated_batches(records),
            "batches_missed": self.batches_missed,
            "vectors_touched": touched() if touched is not None else None,
            "ready_after_s": supervisor.ready_after_s,
            "notes": outcome.notes,
            "machine": machine(),
            "versions": versions(),
        }

    def _records_lost(self, supervisor: Supervisor, recorded: Mapping[int, np.ndarray]) -> int:
        """Updates without a record."""
        arena, algorithm = supervisor.arena, supervisor.algorithm
        if arena is None or algorithm is None:
            return 0
        if self.gossip:
            own = [recorded[worker][len(self.previous.records.get(worker, ())) :] for worker in sorted(recorded)]
            written = [np.count_nonzero(rows["applied_version"] >= 1) for rows in own]
            lost = sum(max(0, made - int(n)) for made, n in zip(arena.shared.updates(), written, strict=False))
            return self.previous.result.get("records_lost", 0) + lost
        undone = [(first, last) for shard, first, last in supervisor.servers.lost if shard == 0]
        return unrecorded(recorded, arena.shared.version, waits=algorithm.lets_gradients_wait, undone=undone)


def last_s(records: Mapping[int, np.ndarray]) -> float:
    """When the last step ended: the run's duration."""
    return max((float(rows["ended_s"].max()) for rows in records.values() if len(rows)), default=0.0)


def served(supervisor: Supervisor) -> dict[str, Any]:
    """What the servers have counted; nothing where there are none."""
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
