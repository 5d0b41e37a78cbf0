"""How a supervisor requests evaluations of a run: requests and answers are words in the run's shared memory.

The evaluator, `serve`, is a process beside worker 0 or a thread; the workers do not wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import RunStopped, UsageError
from paceline.memory import atomics
from paceline.memory.arena import Arena
from paceline.memory.waiting import wait_briefly, wake
from paceline.system.tagged_output import flush_output
from paceline.worker.evaluator import Evaluator

_WORDS, _TEXT = "evaluation words", "evaluation text"
_ASKED, _ANSWERED, _ENDING, _PROCESS, _EPOCH_SAMPLES, _LENGTH = range(6)
_TEXT_BYTES = 100_000
_MOST = 8_000  # characters of a reason and of a trace: no more than six bytes each
NICENESS = 10  # the workers come first
THREAD, ENDED_THREAD = -1, -2


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation, as the evaluator reports it to the supervisor."""

    #: As in `RunData.evaluations`; None: it failed, or the run ended while it waited for the parameters.
    figures: dict[str, Any] | None
    at_s: float = 0.0  # on the machine's monotonic clock: when the parameters had been copied
    finite: bool = True  # whether the parameters were finite
    failure: str = ""  # "usage" or "error" if the evaluating function failed
    reason: str = ""  # the error, or what is wrong with the returned value
    trace: str = ""  # the error's traceback


class EvaluationChannel:
    """The shared words for requests and answers; at most one evaluation is under way."""

    EXTRA = {  # noqa: RUF012  (never written)
        _WORDS: ((6,), torch.int64),
        _TEXT: ((_TEXT_BYTES,), torch.uint8),
    }

    def __init__(self, arena: Arena) -> None:
        self._words = arena.extra(_WORDS)
        self._text = arena.extra(_TEXT)

    @staticmethod
    def of(arena: Arena) -> EvaluationChannel | None:
        """The run's channel; None where nothing is evaluated."""
        return EvaluationChannel(arena) if _WORDS in arena.plan.extra else None

    def _address(self, word: int) -> int:
        return self._words.data_ptr() + 8 * word

    def _load(self, word: int) -> int:
        return atomics.load(self._address(word))

    def _store(self, word: int, value: int) -> None:
        atomics.store(self._address(word), value)

    # The supervisor's side

    @property
    def process(self) -> int:
        """PID of the evaluator; 0: none yet; `THREAD`: a thread of this process; `ENDED_THREAD`: one that has ended."""
        return self._load(_PROCESS)

    @property
    def epoch_samples(self) -> int:
        """About how many samples an epoch has, as the loop's first batch said; 0: not known."""
        return self._load(_EPOCH_SAMPLES)

    @property
    def busy(self) -> bool:
        return self._load(_ASKED) != self._load(_ANSWERED)

    def ask(self) -> None:
        atomics.fetch_add(self._address(_ASKED), 1)
        wake(self._address(_ASKED))

    def result(self) -> EvaluationResult:
        """The last answer; call it once `busy` is over."""
        return EvaluationResult(**json.loads(self._text[: self._load(_LENGTH)].numpy().tobytes()))

    def end(self) -> None:
        """Stops the evaluator after the evaluation under way."""
        self._store(_ENDING, 1)
        wake(self._address(_ASKED))

    # The other side

    def tell_process(self, process: int) -> None:
        self._store(_PROCESS, process)

    def tell_epoch(self, samples: int) -> None:
        self._store(_EPOCH_SAMPLES, samples)

    def serve(self, arena: Arena, evaluator: Evaluator) -> None:
        answered = self._load(_ANSWERED)
        while not self._load(_ENDING):
            asked = wait_briefly(self._address(_ASKED), answered)
            if asked == answered:
                continue
            answered = asked
            result = dataclasses.asdict(_evaluated(arena, evaluator))
            text = json.dumps(result, ensure_ascii=False).encode(errors="replace")
            self._text[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
            self._store(_LENGTH, len(text))
            flush_output()
            self._store(_ANSWERED, answered)

    def serve_in_thread(self, arena: Arena, evaluator: Evaluator, process: int = THREAD) -> threading.Thread:
        """Starts a thread that answers until told to end; `process`: this one's PID, if it is not the supervisor's."""

        def run() -> None:
            try:
                if hasattr(os, "setpriority"):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
                self.serve(arena, evaluator)
            finally:
                self.tell_process(ENDED_THREAD)

        self.tell_process(process)
        thread = threading.Thread(target=run, name="paceline-evaluator", daemon=True)
        thread.start()
        return thread


def _evaluated(arena: Arena, evaluator: Evaluator) -> EvaluationResult:
    try:
        figures = evaluator.now(arena, {})
        return EvaluationResult(figures, evaluator.loaded_s, finite=evaluator.finite)
    except RunStopped:  # while waiting for a lock; the last evaluation follows afterwards
        return EvaluationResult(None)
    except UsageError as error:
        return EvaluationResult(None, failure="usage", reason=str(error)[:_MOST])
    except BaseException as error:  # the user's code may raise anything
        reason = f"evaluate raised {type(error).__name__}: {error}"
        trace = traceback.format_exc()[-_MOST:]  # a long one's end says what went wrong
        return EvaluationResult(None, failure="error", reason=reason[:_MOST], trace=trace)
