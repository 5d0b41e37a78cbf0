"""The process of one worker of `pl.spark.launch`, started by its task: runs the user's loop and reports how it ended.

Spark reuses its Python workers for many tasks, but a process joins a run only once, so the loop has its own process. It
ends with the task, whose end of the pipe it watches.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.errors import PacelineError, WorkerLostError
from paceline.integrations.spark_failures import said
from paceline.integrations.spark_rows import Rows, SpilledRows
from paceline.membership.environment import WorkerEnvironment, set_environment

FAILURE = "failure.json"


@dataclass(frozen=True)
class Loop:
    """The message that a task sends to the process that it has started."""

    function: bytes
    environment: WorkerEnvironment
    rows: int  # descriptor of the file that contains them
    partition: int
    seed: int
    threads: int
    folder: Path
    #: Environment variables by which workers in lockstep find each other.
    variables: dict[str, str] = field(default_factory=dict[str, str])


def main() -> int:
    """Runs the loop read from standard input; returns the exit code."""
    loop: Loop = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_task, args=(loop.folder,), name="task", daemon=True).start()
    os.environ.update(loop.variables)
    torch.set_num_threads(loop.threads)
    set_environment(loop.environment)
    try:
        rows = Rows(SpilledRows(loop.rows), loop.seed)
        pickle.loads(loop.function)(rows)
    except Exception as error:
        traceback.print_exc()
        told = {"said": said(loop.partition, error), "is_ours": isinstance(error, PacelineError)}
        told["follows"] = isinstance(error, WorkerLostError)
        (loop.folder / FAILURE).write_text(json.dumps(told), encoding="utf-8")
        return 1
    return 0


def _end_with_task(folder: Path) -> None:
    """Waits until the task's process is gone, however it ended; then this process and its files are not needed any more."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
