"""The fork server, from which workers are forked: it has PyTorch, the kernels and the task machinery loaded.

A worker gets the program's environment, working folder, path and arguments at the time of the worker's start.
This module does not import PyTorch, so that a command can start the process first, and both import PyTorch at the same time.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver, process
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from paceline.system.paths import socket_folder
from paceline.system.tagged_output import open_closed_streams

# Variables that libraries read when the fork server loads them.
_READ_WHILE_LOADING = (
    "ATEN_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "TORCH",
)  # fmt: skip
# Of these, variables that scikit-learn and PyTorch set when a program imports them.
_SET_WHILE_LOADING = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR")
_address: int | None = None  # a descriptor of the fork server's socket
_loaded_with: dict[str, str] | None = None  # those variables, as the fork server started by this module has them
_replaced: list[int] = []  # process ids of earlier fork servers, which end after the last of their workers


class _Name(str):
    """A process's name that sets the environment as it is unpickled, before the process imports `__main__`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.variables: Mapping[str, str] = {}  # besides those of this process

    def __reduce__(self) -> Any:  # by `eval`, since the new process may not be able to import this module yet
        given = {"given": {**os.environ, **self.variables}, "name": str(self)}
        return eval, ("(environ := __import__('os').environ).clear() or environ.update(given) or name", given)


class _Process(ForkServerProcess):
    """A process that begins with its parent's present environment, and with further variables."""

    def __init__(self, *args: Any, variables: Mapping[str, str] | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self._name = _Name(self._name)  # type: ignore[has-type]
        self._name.variables = variables or {}

    def __getstate__(self) -> dict[str, Any]:  # `__main__` has been imported by then, and may have set variables
        return {**self.__dict__, "_name": str(self._name)}


class _Context(ForkServerContext):
    Process = _Process


def fork_server_context() -> ForkServerContext:
    """The context for starting workers; starts the fork server if it does not run yet, without waiting for it.

    Starts another one if variables have changed that libraries read when they are loaded, such as OMP_NUM_THREADS. A program
    that has already started multiprocessing's fork server keeps it, and its workers start more slowly.
    """
    open_closed_streams()
    context = _Context()
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
    descriptor of the socket works as well as its name, so this function removes the name and the folder at once.
    """
    global _address, _loaded_with
    server: Any = getattr(forkserver, "_forkserver", None)
    wanted = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_WHILE_LOADING) and name not in _SET_WHILE_LOADING
    }
    if _loaded_with not in (None, wanted):
        os.close(server._forkserver_alive_fd)
        _replaced.append(server._forkserver_pid)
        for name in ("address", "alive_fd", "pid"):
            setattr(server, f"_forkserver_{name}", None)
        _loaded_with = None
    _replaced[:] = [pid for pid in _replaced if not _is_reaped(pid)]
    config: Any = getattr(process.current_process(), "_config", None)
    if (
        config is None or not hasattr(server, "_forkserver_address") or _is_running(server._forkserver_pid)
    ):  # another Python's; or there is nothing to do
        forkserver.ensure_running()
        return
    tempdir = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="pl-", dir=socket_folder()) as folder:
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
        _loaded_with = wanted


def _is_running(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # of the process that this one was forked from
        return True


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
