"""The process that workers are forked from: it has PyTorch, the kernels and the task machinery loaded.

Knows nothing of them itself, so that a command can start it before it imports PyTorch, and both load at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing import forkserver, process
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

__all__ = ["fork_server_context"]

_address: int | None = None  # a descriptor of the socket that leads to the fork server


def fork_server_context() -> ForkServerContext:
    """The context to start workers with; starts the fork server if it does not run yet, without waiting for it.

    A program that had started multiprocessing's fork server for itself before keeps it: workers then start slower.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.run.preload"])
    # Signals to the whole group are not for the server, but it ignores them only once it has loaded everything: started with
    # them blocked, it never sees the first.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        _start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start() -> None:
    """Starts the server, and leaves none of its files behind.

    multiprocessing's server listens at a socket in a folder that is removed when this process ends, but not if it is killed. A
    descriptor of the socket does as well as its name, so the name and the folder go at once.
    """
    global _address
    server: Any = getattr(forkserver, "_forkserver", None)
    config: Any = getattr(process.current_process(), "_config", None)
    if (
        config is None or not hasattr(server, "_forkserver_address") or _is_running(server._forkserver_pid)
    ):  # another Python's; or there is nothing to do
        forkserver.ensure_running()
        return
    tempdir = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        config["tempdir"] = folder
        try:
            forkserver.ensure_running()
        finally:
            config["tempdir"] = tempdir
        name = server._forkserver_address
        if Path(name).parent != Path(folder):
            return
        if _address is not None:
            os.close(_address)  # of one that has died
        _address = os.open(name, os.O_PATH | os.O_CLOEXEC)
        server._forkserver_address = f"/proc/self/fd/{_address}"


def _is_running(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # of the process that this one was forked from
        return True
