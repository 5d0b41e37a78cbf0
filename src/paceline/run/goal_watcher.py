"""Watches a run's targets and limits: asks for evaluations, and stops the run at its goal."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from multiprocessing import connection
from typing import Any

from paceline.records.step_record import last_s
from paceline.run.recording import Recording
from paceline.worker.evaluation_channel import ENDED_THREAD, THREAD, EvaluationChannel, EvaluationResult
from paceline.worker.evaluator import Evaluator
from paceline.worker.process import Failure

_LOOK_EVERY_S = 0.005
_NEWS_S = 1.0  # a supervisor notices worker 0's death within this time, possibly later than the evaluating process


class GoalWatcher:
    """Watches one run of real workers, as its supervisor does.

    Args:
        recording: of the run, with its goal; gets the evaluations.
        evaluator: for a thread of this process; None: worker 0 starts an evaluator, if its loop can be evaluated.
    """

    def __init__(self, recording: Recording, evaluator: Evaluator | None = None) -> None:
        self.worst_worker_accuracy: float | None = None  # of the models that are there at the end
        self._recording = recording
        self._supervisor = recording.supervisor
        self._evaluator = evaluator
        self._thread: threading.Thread | None = None
        self._channel: EvaluationChannel | None = None
        self._asked: dict[str, float | int | None] | None = None  # about the evaluation under way
        self._evaluated_samples = recording.samples
        self._process = 0
        self._watch: int | None = None  # a descriptor that becomes readable when the process has ended
        self._gone_s: float | None = None  # since when that is known
        self._told = False

    def tick(self) -> None:
        """Checks whether the goal is reached, and whether an evaluation is due."""
        recording, goal = self._recording, self._recording.goal
        if recording.is_at_goal() or (goal.limit_s is not None and recording.elapsed_s() >= goal.limit_s):
            self._supervisor.stop()
        channel = self._open_channel()
        if channel is None:
            return
        if self._asked is not None and not channel.busy:
            self._collect(channel)
        every = goal.evaluate_every(channel.epoch_samples)
        if self._asked is None and recording.samples // every > self._evaluated_samples // every:
            self._ask(channel, recording.samples)

    def end(self) -> None:
        """Evaluates the final parameters once all workers have ended."""
        channel = self._open_channel(all_ended=True)
        if channel is None or (self._evaluator is None and self._supervisor.outcome.name == "crashed"):
            return
        if self._asked is not None and self._wait(channel):
            self._collect(channel)
        records = self._recording.decided(self._recording.records())
        samples = sum(int(rows["samples"][rows["applied_version"] >= 1].sum()) for rows in records.values())
        self._ask(channel, samples)
        if self._wait(channel):
            self._collect(channel, ended_s=last_s(records))
        else:
            self._open_channel(all_ended=True)  # adds the note
        if self._evaluator is not None and self._supervisor.arena is not None:
            self.worst_worker_accuracy = self._evaluator.worst_worker_accuracy(self._supervisor.arena)

    def close(self) -> None:
        """Stops the evaluator; worker 0's process waits for its end, or this call if it is a thread."""
        if self._channel is not None:
            self._channel.end()
        if self._thread is not None:
            self._thread.join()
        self._look_at(None)
        self._channel = None

    def _look_at(self, process: int | None) -> None:
        if self._watch is not None:
            os.close(self._watch)
        self._watch = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._watch = os.pidfd_open(process)

    def _has_ended(self, channel: EvaluationChannel) -> bool:
        if channel.process in (THREAD, ENDED_THREAD):
            return channel.process == ENDED_THREAD
        return self._watch is None or bool(connection.wait([self._watch], 0))  # unlike select, beyond 1,024 descriptors

    def _open_channel(self, *, all_ended: bool = False) -> EvaluationChannel | None:
        """The channel to the evaluator; notes once if the evaluator is gone, and whether worker 0's death is the cause."""
        supervisor = self._supervisor
        if self._channel is None:
            self._channel = EvaluationChannel.of(supervisor.arena) if supervisor.arena is not None else None
            if self._channel is None:
                return None
            if self._evaluator is not None and supervisor.arena is not None:
                self._thread = self._channel.serve_in_thread(supervisor.arena, self._evaluator)
        process = self._channel.process
        if process in (0, THREAD):
            return self._channel if process == THREAD else None
        if process != self._process:  # the first one, or that of a new worker 0
            self._process, self._told, self._gone_s = process, False, None
            self._look_at(process if process != ENDED_THREAD else None)
        if not self._has_ended(self._channel):
            return self._channel
        if self._gone_s is None:
            self._gone_s = time.monotonic()
            self._asked = None
            self._give_back()
        first = supervisor.workers[0]
        lost = first.lost
        if not (self._told or first.waits) and (lost or all_ended or time.monotonic() - self._gone_s > _NEWS_S):
            self._told = True
            who = "thread" if process == ENDED_THREAD else "process"
            why = "ended with worker 0" if lost else f"ended, as the {who} that made them is gone"
            supervisor.outcome.notes.append(f"Evaluations have {why}.")
        return None

    def _give_back(self) -> None:
        """Frees what the process held if it was killed while it copied the parameters: a lock, or a slot."""
        arena = self._supervisor.arena
        if arena is not None and arena.plan.needs.kind in ("locked", "slots"):
            arena.shared.recover(arena.participant_id, 0)

    def _ask(self, channel: EvaluationChannel, samples: int) -> None:
        self._asked = {"samples": samples, "train_loss": self._recording.loss}
        self._evaluated_samples = samples
        channel.ask()

    def _wait(self, channel: EvaluationChannel) -> bool:
        """Waits for the evaluation under way; False: the evaluator is gone."""
        while channel.busy:
            if self._has_ended(channel):
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _collect(self, channel: EvaluationChannel, *, ended_s: float | None = None) -> None:
        """Handles the finished evaluation; `ended_s`: the end of the last step, for the evaluation of its parameters."""
        asked, self._asked = self._asked, None
        result = channel.result()
        if result.failure:
            self._supervisor.fail("", Failure(result.failure, result.reason, result.trace))
        if result.figures is None:
            return
        evaluation: dict[str, Any] = {"elapsed_s": self._elapsed_s(result, ended_s), **(asked or {}), **result.figures}
        if self._recording.take_evaluation(evaluation):
            self._supervisor.stop()
        if ended_s is not None:
            self._recording.end_if_not_finite(self._supervisor.outcome, finite=result.finite)

    def _elapsed_s(self, result: EvaluationResult, ended_s: float | None) -> float:
        """When the parameters had been copied."""
        recording = self._recording
        if ended_s is None:
            return recording.elapsed_before_s + result.at_s - (self._supervisor.started_s or 0.0)
        return max([ended_s, *(one["elapsed_s"] for one in recording.evaluations[-1:])])
