"""One run of one method: its processes are started, watched, ended; its folder is judged and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from contest.course import Settings
from contest.judge import judge
from contest.methods import METHODS, command, variables
from contest.stolen import Stolen

GRACE_S = 8.0
LOOK_EVERY_S = 1.0


def run(settings: Settings, *, target: float, pythons: dict[str, str]) -> dict[str, Any]:
    """What happened, with the settings; a run that fails or stands still is a record, too, with its last words."""
    method = METHODS[settings.method]
    with tempfile.TemporaryDirectory(prefix="head-to-head-") as name:
        settings = replace(settings, folder=name)
        output = Path(name) / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command(method, settings.workers, settings.scene, pythons),
                env={**variables(), **settings.variables()},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started_s, stolen = time.monotonic(), Stolen()
            try:
                code = outcome(process, partial(steps_made, Path(name)), settings.silent_s)
            finally:
                end(process)
        took_s, stolen_share = time.monotonic() - started_s, stolen.share()
        with contextlib.suppress(OSError):
            shutil.rmtree(Path(name) / "run")
        found = judge(settings, mean=method.mean, target=target, finished=code == 0, in_time=code is not None)
        words = output.read_text(errors="replace")
    kept = {key: value for key, value in asdict(settings).items() if key not in ("folder", "data")}
    ending = {} if code == 0 else {"code": code, "last_words": words[-2000:]}
    return {**kept, **found, **ending, "target": target, "took_s": took_s, "stolen_share": stolen_share}


def outcome(
    process: Any, progress: Callable[[], int], silent_s: float, clock: Callable[[], float] = time.monotonic
) -> int | None:
    """Exit code of a run; None if it made no progress for `silent_s`. A slow machine makes a run longer, and never ends it."""
    seen, since_s = progress(), clock()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_EVERY_S)
        if (made := progress()) != seen:
            seen, since_s = made, clock()
        elif clock() - since_s > silent_s:
            return None


def steps_made(folder: Path) -> int:
    """Bytes of all diaries, which grow with every step of every worker."""
    return sum(path.stat().st_size for path in folder.glob("steps-*"))


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left: asks the launcher, which knows its workers, and then makes sure of its whole session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
