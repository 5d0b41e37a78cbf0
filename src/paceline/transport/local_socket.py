"""Sockets between one user's processes on one machine: the kernel keeps others out, and a kill leaves no files behind."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Literal

import zmq

from paceline.system.paths import socket_folder

_PROBE_S = 2.0


class LocalSocket:
    """A Unix socket that is reached through a descriptor of this process: `/proc/PID/fd/N`.

    Its file, in a folder of mode 0700, is removed as soon as the descriptor is open. From then on the kernel lets in only
    processes that may inspect this one: the same user's, and root's. However the process ends, no file is left.

    If a sandbox does not allow such access, the file and its folder stay until `close`.

    Raises:
        OSError: there is no folder for temporary files, or no descriptor is left.
    """

    def __init__(self, listener: zmq.Socket) -> None:
        self._folder: str | None = tempfile.mkdtemp(prefix="pl-", dir=socket_folder())
        self._pid = os.getpid()
        name = f"{self._folder}/socket"
        self._descriptor = -1
        try:
            listener.bind(f"ipc://{name}")
            self._descriptor = os.open(name, os.O_PATH | os.O_CLOEXEC)
            self.endpoint = f"ipc://{name}"
            if _descriptors_lead_to_sockets():
                self.endpoint = f"ipc:///proc/{self._pid}/fd/{self._descriptor}"
                self._remove()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the descriptor and removes the folder, except in a fork, which does not own the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if os.getpid() == self._pid:
            self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def is_endpoint(text: str) -> bool:
    """Whether the text is an address to which a socket can connect without a name server; it need not be in use."""
    scheme, _, where = text.partition("://")
    if scheme == "ipc":
        return where.startswith("/") and len(where) < 108
    host, _, port = where.rpartition(":")
    with contextlib.suppress(ValueError):
        return scheme == "tcp" and bool(ipaddress.ip_address(host.strip("[]"))) and 0 < int(port) < 65536
    return False


def is_own(endpoint: str) -> bool:
    """Whether it is this user's socket on this machine, as a worker of the same run would have."""
    scheme, _, where = endpoint.partition("://")
    try:
        return scheme == "ipc" and Path(where).stat().st_uid == os.geteuid()
    except OSError:
        return False


def is_heard(endpoint: str) -> bool:
    """Whether a process listens there, according to its kernel; a local process too busy to accept counts."""
    return answer_of(endpoint) in ("process", "busy")


def is_refused(endpoint: str) -> bool:
    """Whether its kernel says that no process listens there; silence does not say so."""
    return answer_of(endpoint) == "refusal"


def answer_of(endpoint: str) -> Literal["process", "busy", "refusal", "silence"]:
    """What a connection to this address meets."""
    scheme, _, where = endpoint.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PROBE_S)
                probe.connect(where)
        else:
            host, _, port = where.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return "refusal"
    except OSError:
        return "busy" if scheme == "ipc" else "silence"
    return "process"


@functools.cache
def _descriptors_lead_to_sockets() -> bool:
    if not is_own("ipc:///proc/self/stat"):  # not even this user's own processes may inspect this one
        return False
    with (
        tempfile.TemporaryDirectory(prefix="pl-", dir=socket_folder()) as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/socket")
        listener.listen()
        descriptor = os.open(f"{folder}/socket", os.O_PATH | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"/proc/{os.getpid()}/fd/{descriptor}")
                return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
