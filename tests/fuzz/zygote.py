"""A process that has everything imported, and forks a child for each command line: a second of imports becomes 10 ms.

Run by `sandbox.py`, which talks to it in lines of JSON. A child may take so much memory and processor time and no more;
whatever it starts is counted, and ended with it.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing.forkserver as forkserver
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from leftovers import descendants

MEMORY_BYTES = 4 * 2**30  # address space on top of what is mapped already
FILE_BYTES = 2**28
OPEN_FILES = 1024  # on no machine, thousands of workers are started
MOST_PROCESSES = 40
ENDS_WITHIN_S = 60.0  # what a child has started, after its own end
_PR_SET_CHILD_SUBREAPER = 36

# What the verbs import when they run.
MODULES = (
    "paceline.cli.app", "paceline.run.preload", "paceline.run.train", "paceline.run.launch",
    "paceline.run.simulate_task", "paceline.advice.calibration.machine", "paceline.advice.advise", "paceline.advice.report",
    "paceline.study.runner", "paceline.study.report", "paceline.study.table", "paceline.study.findings",
    "paceline.integrations.sparse_jobs", "paceline.run.launch_script", "paceline.observe.report",
    "paceline.observe.tables", "paceline.observe.progress", "paceline.model_parallel.layers",
    "paceline.planner.balance", "paceline.planner.backups", "paceline.tasks.digits_mlp", "paceline.tasks.mnist",
    "paceline.tasks.cifar10_cnn", "sklearn.datasets", "rich.progress", "rich.table",
)  # fmt: skip


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a child become ours, and are seen
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    from paceline.run.fork_server import fork_server_context

    warm = fork_server_context().Process(target=os.getpid)
    warm.start()
    warm.join()
    forkserver._forkserver.ensure_running = lambda: None  # a forked child may not wait for a process of its parent's
    forkserver.ensure_running = lambda: None
    gc.freeze()
    ours = descendants(os.getpid())
    print("ready", file=answers, flush=True)
    for line in requests:
        print(json.dumps(attend(ours=ours, **json.loads(line))), file=answers, flush=True)


def attend(*, words: list[str], folder: str, scratch: str, limit_s: float, ours: set[int]) -> dict[str, object]:
    """Runs one command line in a child, and says how it went."""
    begun_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(words, folder, scratch, limit_s)
    status = None
    stopped = ""
    next_look_s = begun_s + 0.3
    while status is None:
        ended, found = os.waitpid(pid, os.WNOHANG)
        now_s = time.monotonic()
        if ended:
            status = found
        elif now_s - begun_s > limit_s:
            stopped = f"not done after {limit_s:.0f} s"
        elif now_s > next_look_s:
            next_look_s = now_s + 0.1
            if (many := len(descendants(os.getpid()) - ours)) > MOST_PROCESSES:
                stopped = f"{many} processes"
        if stopped:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        time.sleep(0.003)
    took_s = time.monotonic() - begun_s
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stopped": stopped,
        "took_s": took_s,
        "left": gone(ours),
        "out": Path(scratch, "out").read_text(errors="surrogateescape"),
        "err": Path(scratch, "err").read_text(errors="surrogateescape"),
    }


def gone(ours: set[int]) -> list[str]:
    """Waits for what a child has started to end; names, and ends, what does not."""
    until_s = time.monotonic() + ENDS_WITHIN_S
    while left := descendants(os.getpid()) - ours:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > until_s:
            names = [Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode() for one in left]
            for one in left:
                os.kill(one, signal.SIGKILL)
            return names
        time.sleep(0.005)
    return []


def child(words: list[str], folder: str, scratch: str, limit_s: float) -> None:
    """Never returns."""
    code = 70
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(scratch, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        faulthandler.dump_traceback_later(limit_s - 1.0, file=2)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * limit_s),) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        atexit._clear()
        sys.argv = ["paceline", *words]
        from paceline.cli.app import main as command

        try:
            command()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
