"""Evaluations of a launched loop: a process beside worker 0 makes them when the supervisor asks, by words in shared memory.

The process is forked once, before training. So the user's function and its data need not be sent anywhere, its random numbers
are its own, and workers wait neither for it nor for an interpreter that they would share with it. With worker threads it is
a thread. It ends when it is told to, or with worker 0's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.algorithms import Algorithm
from paceline.errors import UsageError
from paceline.evaluation.goal import Goal
from paceline.evaluation.model import NICENESS, ModelEvaluator
from paceline.evaluation.user import Evaluate, loop_evaluator
from paceline.membership.environment import WorkerEnvironment
from paceline.memory import atomics
from paceline.memory.arena import Arena
from paceline.memory.waiting import RunStopped, wait_briefly, wake_all
from paceline.system.interrupts import leave_to_supervisor
from paceline.worker.session import Session

__all__ = ["THREAD", "Answer", "EvaluationBoard", "session_of"]

_WORDS, _FIGURES, _TEXT = "evaluation words", "evaluation figures", "evaluation text"
_ASKED, _ANSWERED, _ENDING, _FAILED, _PROCESS, _EPOCH_SAMPLES, _VERSION, _FINITE = range(8)
_LOSS, _ACCURACY, _DISTANCE, _AT_S = range(4)
_TEXT_BYTES = 16_384
_USAGE, _ERROR = 1, 2  # how it failed
_PR_SET_PDEATHSIG = 1
THREAD = -1


@dataclass(frozen=True)
class Answer:
    """One evaluation, as the process that made it tells the supervisor.

    Args:
        figures: as in `RunData.evaluations`; None: it failed, or the run ended while it waited for the parameters.
        at_s: on the machine's monotonic clock: when the parameters had been copied.
        finite: whether they were.
        failure: "usage" or "error" where the user's function failed.
        reason: what it raised, or what is wrong with what it returned.
        trace: of what it raised.
    """

    figures: dict[str, Any] | None
    at_s: float = 0.0
    finite: bool = True
    failure: str = ""
    reason: str = ""
    trace: str = ""


class EvaluationBoard:
    """The shared words by which evaluations are asked for and answered; there is at most one under way."""

    EXTRA = {  # noqa: RUF012  (never written)
        _WORDS: ((8,), torch.int64),
        _FIGURES: ((4,), torch.float64),
        _TEXT: ((_TEXT_BYTES,), torch.uint8),
    }

    def __init__(self, arena: Arena) -> None:
        self._words = arena.extra(_WORDS)
        self._figures = arena.extra(_FIGURES)
        self._text = arena.extra(_TEXT)

    @staticmethod
    def of(arena: Arena) -> EvaluationBoard | None:
        """The run's board; None where nothing is evaluated."""
        return EvaluationBoard(arena) if _WORDS in arena.plan.extra else None

    def _address(self, word: int) -> int:
        return self._words.data_ptr() + 8 * word

    def _load(self, word: int) -> int:
        return atomics.load(self._address(word))

    def _store(self, word: int, value: int) -> None:
        atomics.store(self._address(word), value)

    # The supervisor's side

    @property
    def process(self) -> int:
        """Process id of who evaluates; 0: nobody does yet; `THREAD`: a thread of this process."""
        return self._load(_PROCESS)

    @property
    def epoch_samples(self) -> int:
        """About how many samples an epoch has, as the loop's first batch said; 0: not known."""
        return self._load(_EPOCH_SAMPLES)

    @property
    def busy(self) -> bool:
        """Whether an evaluation has been asked for and not been answered."""
        return self._load(_ASKED) != self._load(_ANSWERED)

    def ask(self) -> None:
        """Asks for an evaluation of the newest parameters."""
        atomics.fetch_add(self._address(_ASKED), 1)
        wake_all(self._address(_ASKED))

    def answer(self) -> Answer:
        """The last answer; call it once `busy` is over."""
        failed = self._load(_FAILED)
        if failed:
            reason, _, trace = bytes(self._text.tolist()).rstrip(b"\0").decode(errors="replace").partition("\0")
            return Answer(None, failure="usage" if failed == _USAGE else "error", reason=reason, trace=trace)
        loss, accuracy, distance, at_s = self._figures.tolist()
        version = self._load(_VERSION)
        if version < 0:
            return Answer(None)
        figures = {"version": version, "test_loss": _known(loss), "test_accuracy": _known(accuracy)}
        if not math.isnan(distance):
            figures["consensus_distance"] = distance
        return Answer(figures, at_s, finite=bool(self._load(_FINITE)))

    def end(self) -> None:
        """Lets who evaluates end, after the evaluation under way."""
        self._store(_ENDING, 1)
        wake_all(self._address(_ASKED))

    # The other side

    def tell_process(self, process: int) -> None:
        """Who evaluates, from now on."""
        self._store(_PROCESS, process)

    def tell_epoch(self, samples: int) -> None:
        """About how many samples an epoch has."""
        self._store(_EPOCH_SAMPLES, samples)

    def serve(self, arena: Arena, evaluator: ModelEvaluator) -> None:
        """Answers until told to end."""
        answered = self._load(_ANSWERED)
        while not self._load(_ENDING):
            asked = wait_briefly(self._address(_ASKED), answered)
            if asked == answered:
                continue
            answered = asked
            try:
                self._evaluate(arena, evaluator)
            except UsageError as error:
                self._fail(_USAGE, str(error), "")
            except (Exception, SystemExit) as error:  # whatever the user's code raises
                self._fail(_ERROR, f"evaluate raised {type(error).__name__}: {error}", traceback.format_exc())
            sys.stdout.flush()
            self._store(_ANSWERED, answered)

    def _evaluate(self, arena: Arena, evaluator: ModelEvaluator) -> None:
        self._store(_VERSION, -1)
        with contextlib.suppress(RunStopped):  # while it waited for a lock; the last evaluation is made afterwards
            found = evaluator.now(arena, {})
            named = (found["test_loss"], found["test_accuracy"], found.get("consensus_distance"))
            figures = [math.nan if one is None else one for one in (*named, evaluator.loaded_s)]
            self._figures.copy_(torch.tensor(figures, dtype=torch.float64))
            self._store(_FINITE, int(evaluator.finite))
            self._store(_VERSION, found["version"])

    def _fail(self, how: int, reason: str, trace: str) -> None:
        first = reason.encode()[: _TEXT_BYTES // 2] + b"\0"
        text = first + trace.encode()[-(_TEXT_BYTES - len(first)) :]  # a long trace's end says what went wrong
        self._text.zero_()
        self._text[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self._store(_FAILED, how)


def session_of(
    model: nn.Module, algorithm: Algorithm, environment: WorkerEnvironment | None, evaluate: Evaluate | None
) -> Session:
    """A worker's membership in a real run; where the launcher wants evaluations, worker 0 starts who makes them.

    Raises:
        UsageError: the launcher wants a target accuracy, and there is no `evaluate`.
    """
    goal = environment.options.get("goal") if environment is not None and environment.supervised else None
    if not isinstance(goal, Goal) or environment is None:
        return Session(model, algorithm, environment)
    goal.check(evaluate)
    if evaluate is None:
        return Session(model, algorithm, environment)
    evaluator = None
    if environment.worker_id == 0:
        evaluator = loop_evaluator(model, evaluate, needs_accuracy=goal.target_accuracy is not None)
    session = Session(model, algorithm, environment, extra=EvaluationBoard.EXTRA)
    plan = session.arena.plan
    board = EvaluationBoard(session.arena)
    session.tell_epoch = board.tell_epoch
    if evaluator is not None:
        arena = Arena(session.arena.segment, plan, participant_id=plan.num_workers + plan.num_server_programs)
        start = _start_process if environment.options.get("own_process") else _start_thread
        environment.evaluating = start(board, arena, evaluator)
    return session


class _Forked:
    """The process that evaluates, for worker 0, whose child it is."""

    def __init__(self, process: int) -> None:
        self._process = process

    def join(self) -> None:
        """Waits until it has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


def _start_process(board: EvaluationBoard, arena: Arena, evaluator: ModelEvaluator) -> _Forked:
    sys.stdout.flush()  # or both processes would write what is in the buffers
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forks beside threads: none of them runs Python that locks
        process = os.fork()
    if process:
        board.tell_process(process)
        return _Forked(process)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        leave_to_supervisor()
        if os.getppid() == parent:  # it has not died before
            torch.set_num_threads(1)
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
            board.serve(arena, evaluator)
    finally:
        os._exit(0)


def _start_thread(board: EvaluationBoard, arena: Arena, evaluator: ModelEvaluator) -> threading.Thread:
    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        board.serve(arena, evaluator)

    board.tell_process(THREAD)
    thread = threading.Thread(target=run, name="paceline-evaluator", daemon=True)
    thread.start()
    return thread


def _known(figure: float) -> float | None:
    return None if math.isnan(figure) else figure
