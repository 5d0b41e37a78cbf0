"""The supervisor's part of a loop's targets and limits: asks for evaluations, and stops the run at its goal."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing import connection

from paceline.evaluation.goal import Goal
from paceline.run.recording import Recording, last_s
from paceline.supervisor.supervisor import Supervisor
from paceline.worker.evaluation_process import THREAD, Answer, EvaluationBoard
from paceline.worker.process import Failure

__all__ = ["Judge"]

_LOOK_EVERY_S = 0.005


class Judge:
    """Watches one launched run.

    Args:
        goal: when it shall end, and be evaluated.
        recording: of the run; gets the evaluations.
    """

    def __init__(self, goal: Goal, recording: Recording) -> None:
        self._goal = goal
        self._recording = recording
        self._board: EvaluationBoard | None = None
        self._asked: dict[str, float | int | None] | None = None  # about the evaluation under way
        self._evaluated_samples = recording.samples
        self._process = 0
        self._watch: int | None = None  # a descriptor that becomes readable when the process has ended
        self._told = False

    def share_done(self, elapsed_s: float) -> float:
        """How much of the nearest limit is behind; 0 without limits."""
        limit_s, limit_samples = self._goal.limit_s, self._goal.limit_samples
        shares = [elapsed_s / limit_s] if limit_s is not None else []
        shares += [self._recording.samples / limit_samples] if limit_samples is not None else []
        return min(1.0, max(shares, default=0.0))

    def tick(self, supervisor: Supervisor) -> None:
        """Looks whether the goal is reached, and whether an evaluation is due."""
        goal, recording = self._goal, self._recording
        elapsed_s, loss = recording.elapsed_s(supervisor), recording.loss
        if goal.target_loss is not None and loss is not None and recording.window_full and loss <= goal.target_loss:
            supervisor.stop()
        if goal.limit_s is not None and elapsed_s >= goal.limit_s:
            supervisor.stop()
        if goal.limit_samples is not None and recording.samples >= goal.limit_samples:
            supervisor.stop()
        if not self._is_there(supervisor):
            return
        assert self._board is not None
        if self._asked is not None and not self._board.busy:
            self._collect(supervisor)
        every = goal.evaluate_every(self._board.epoch_samples)
        if self._asked is None and recording.samples // every > self._evaluated_samples // every:
            self._ask()

    def end(self, supervisor: Supervisor) -> None:
        """All workers have ended: evaluates once more, the parameters that they leave."""
        if not self._is_there(supervisor) or supervisor.outcome.name == "crashed":
            return
        if self._asked is not None and self._wait():
            self._collect(supervisor)
        self._ask()
        if self._wait():
            self._collect(supervisor, last=True)

    def close(self) -> None:
        """Lets who evaluates end; worker 0's process waits for that."""
        if self._board is not None:
            self._board.end()
        self._look_at(None)
        self._board = None

    def _look_at(self, process: int | None) -> None:
        if self._watch is not None:
            os.close(self._watch)
        self._watch = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._watch = os.pidfd_open(process)

    def _has_ended(self) -> bool:
        return self._watch is None or bool(connection.wait([self._watch], 0))  # unlike select, beyond 1,024 descriptors

    def _is_there(self, supervisor: Supervisor) -> bool:
        """Whether somebody evaluates; says so once if nobody does any more."""
        if self._board is None:
            self._board = EvaluationBoard.of(supervisor.arena) if supervisor.arena is not None else None
            if self._board is None:
                return False
        process = self._board.process
        if process in (0, THREAD):
            return process == THREAD
        if process != self._process:  # the first one, or that of a new worker 0
            self._process, self._told = process, False
            self._look_at(process)
        if not self._has_ended():
            return True
        if not self._told:
            self._told = True
            self._asked = None
            self._give_back(supervisor)
            lost = 0 in supervisor.outcome.workers_lost
            why = "ended with worker 0" if lost else "ended, as the process that made them is gone"
            supervisor.outcome.notes.append(f"Evaluations have {why}.")
        return False

    def _give_back(self, supervisor: Supervisor) -> None:
        """Frees what the process held if it was killed while it copied the parameters: a lock, or a slot."""
        arena = supervisor.arena
        if arena is not None and arena.plan.request.kind in ("locked", "slots"):
            arena.shared.recover(arena.participant_id, 0)

    def _ask(self) -> None:
        assert self._board is not None
        recording = self._recording
        self._asked = {"samples": recording.samples, "train_loss": recording.loss}
        self._evaluated_samples = recording.samples
        self._board.ask()

    def _wait(self) -> bool:
        """Waits for the evaluation under way; False: who made it is gone."""
        assert self._board is not None
        while self._board.busy:
            if self._process and self._has_ended():
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _collect(self, supervisor: Supervisor, *, last: bool = False) -> None:
        assert self._board is not None
        asked, self._asked = self._asked, None
        answer = self._board.answer()
        if answer.failure:
            supervisor.fail(Failure(answer.failure, answer.reason, answer.trace))
        if answer.figures is None:
            return
        evaluation = {"elapsed_s": self._elapsed_s(supervisor, answer, last=last), **(asked or {}), **answer.figures}
        self._recording.evaluations.append(evaluation)
        accuracy, target = evaluation["test_accuracy"], self._goal.target_accuracy
        if target is not None and accuracy is not None and accuracy >= target:
            supervisor.stop()
        if last and supervisor.outcome.name == "stopped" and not answer.finite:
            supervisor.outcome.name = "diverged"
            supervisor.outcome.reason = f"The parameters are not finite at version {evaluation['version']}."

    def _elapsed_s(self, supervisor: Supervisor, answer: Answer, *, last: bool) -> float:
        """When the parameters had been copied; the last ones are those of the last step's end."""
        recording = self._recording
        if last:
            before_s = recording.evaluations[-1]["elapsed_s"] if recording.evaluations else 0.0
            return max(before_s, last_s(recording.records(supervisor)))
        return recording.elapsed_before_s + answer.at_s - (supervisor.started_s or 0.0)
