"""Sockets of one user's processes: nobody else gets in, and nothing is left of them, however their process ends."""

import ctypes
import os
import signal
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

import forked
from paceline.transport import local_socket
from paceline.transport.local_socket import LocalSocket, is_endpoint, is_heard, is_own

NOBODY = 65534


@pytest.fixture
def folder():
    """Unlike `tmp_path` it is short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def listener(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        yield socket


def test_it_is_heard_until_it_is_closed_and_has_no_file(listener, folder):
    own = LocalSocket(listener)
    assert list(folder.iterdir()) == []
    assert is_endpoint(own.endpoint)
    assert is_heard(own.endpoint)
    assert forked.call(lambda: int(is_heard(own.endpoint))) == 1
    listener.close(linger=0)
    own.close()
    assert not is_heard(own.endpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in(listener):
    own = LocalSocket(listener)

    def knock():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with socket.socket(socket.AF_UNIX) as raw:
            try:
                raw.connect(own.endpoint.removeprefix("ipc://"))
            except PermissionError:
                return 7
        return 0

    assert forked.call(knock) == 7
    own.close()


def test_a_fork_that_closes_it_leaves_it_to_its_owner(listener, folder, monkeypatch):
    for by_descriptor in (True, False):
        monkeypatch.setattr(local_socket, "_descriptors_lead_to_sockets", lambda: by_descriptor)  # noqa: B023
        own = LocalSocket(listener)
        assert forked.call(lambda: own.close() or 7) == 7  # noqa: B023
        assert is_heard(own.endpoint)
        listener.unbind(listener.get_string(zmq.LAST_ENDPOINT))
        own.close()
        own.close()
    assert list(folder.iterdir()) == []


def test_one_whose_process_was_killed_is_not_heard(tmp_path):
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
                os.write(tell, LocalSocket(socket).endpoint.encode())
                signal.pause()
        finally:
            os._exit(0)
    os.close(tell)
    endpoint = os.read(told, 200).decode()
    os.close(told)
    assert is_heard(endpoint)
    assert is_own(endpoint)
    os.kill(pid, signal.SIGSTOP)
    assert is_heard(endpoint), "it is stopped, and will go on"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_heard(endpoint), "nor while nobody has taken note of its end"
    os.waitpid(pid, 0)
    assert not is_heard(endpoint)
    assert not is_own(endpoint)


def test_a_listener_that_is_too_busy_to_answer_is_heard(tmp_path):
    with socket.socket(socket.AF_UNIX) as busy, ExitStack() as stack:
        busy.bind(str(tmp_path / "busy"))
        busy.listen(0)
        for _ in range(3):
            assert is_heard(f"ipc://{tmp_path}/busy")
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(str(tmp_path / "busy"))


def test_a_listening_port_is_heard_until_it_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert is_heard(endpoint)
        assert not is_own(endpoint)
    assert not is_heard(endpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="root looks into any process, and only it can become another user")
def test_a_process_that_may_not_be_looked_into_keeps_its_file():
    """As one whose program has capabilities: the kernel lets not even the same user's processes in by its descriptors."""
    local_socket._descriptors_lead_to_sockets.cache_clear()
    libc = ctypes.CDLL(None)

    def look():
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(4, 0)  # PR_SET_DUMPABLE
        tempfile.tempdir = None
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            own = LocalSocket(socket)
            own.close()
        return 7 if "/socket" in own.endpoint else 8

    assert forked.call(look) == 7


def test_where_descriptors_lead_nowhere_the_file_stays_until_the_end(listener, folder, monkeypatch):
    monkeypatch.setattr(local_socket, "_descriptors_lead_to_sockets", lambda: False)
    own = LocalSocket(listener)
    (inner,) = folder.iterdir()
    assert inner.stat().st_mode & 0o777 == 0o700
    assert Path(own.endpoint.removeprefix("ipc://")).parent == inner
    assert is_heard(own.endpoint)
    listener.close(linger=0)
    own.close()
    assert list(folder.iterdir()) == []


def test_a_folder_whose_path_is_too_long_is_replaced(listener, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    own = LocalSocket(listener)
    assert is_heard(own.endpoint)
    own.close()
    assert list(deep.iterdir()) == []


def test_a_socket_that_cannot_be_bound_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    class Refusing:
        def bind(self, _):
            raise zmq.ZMQError(13)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(zmq.ZMQError):
        LocalSocket(Refusing())
    assert list(tmp_path.iterdir()) == []
