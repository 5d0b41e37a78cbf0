"""The join point answers holders of the key; others get no further than the handshake, and nobody can fill it."""

import gc
import itertools
import json
import os
import signal
import socket
import struct
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

import forked
import leftovers
from paceline.errors import UsageError, WorkerLostError
from paceline.membership import join_point as meetings
from paceline.membership import store
from paceline.membership.join_point import JoinPoint, JoinPointLostError
from paceline.transport.authentication import authenticate
from paceline.transport.keys import create_keys, own_keys
from processes.join_programs import free_address

DEADLINE_S = forked.AGAINST_HANGS_S


@pytest.fixture
def address():
    before = leftovers.everything()
    yield free_address()
    leftovers.assert_nothing_new(before)


@pytest.fixture
def held(address):
    """The join point, and a worker that has come to it."""
    holder = JoinPoint(address, None, DEADLINE_S)
    guest = JoinPoint(address, None, DEADLINE_S)
    yield holder, guest
    guest.close()
    holder.close()


def port_of(address):
    return int(address.rpartition(":")[2])


def test_it_is_a_store(held):
    holder, guest = held
    assert (holder.holds, guest.holds, guest.host, guest.key) == (True, False, None, None)
    assert not guest.check(["a"])
    guest.set("a", "1")
    assert holder.check(["a"])
    assert holder.get("a") == b"1"
    assert [guest.add("count", 4), holder.add("count", 0), holder.add("count", 1)] == [4, 4, 5]
    assert holder.compare_set("place", "", "me") == b"me"
    assert guest.compare_set("place", "", "you") == b"me"
    assert guest.compare_set("place", "me", "you") == b"you"
    assert guest.compare_set("other", "else", "x") == b""
    assert guest.agree_words("hello", {"model": "mlp"}) == holder.agree_words("hello", {}) == {"model": "mlp"}


def test_many_threads_of_one_worker_ask(held):
    _, guest = held
    threads = [threading.Thread(target=lambda: [guest.add("n", 1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guest.add("n", 0) == 200


def test_ipv6_loopback(address):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    where = f"[::1]:{port_of(address)}"
    holder, guest = JoinPoint(where, None, DEADLINE_S), JoinPoint(where, None, DEADLINE_S)
    assert guest.add("n", 2) == holder.add("n", 0) == 2
    guest.close()
    holder.close()


def test_closing_twice_and_using_it_afterwards(address):
    holder = JoinPoint(address, None, DEADLINE_S)
    holder.close()
    holder.close()
    with pytest.raises(JoinPointLostError):
        holder.add("n", 1)
    again = JoinPoint(address, None, DEADLINE_S)
    assert again.holds
    again.close()


@pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning")
def test_one_that_was_forgotten_holds_nobody_up(held):
    holder, guest = held
    forgotten = JoinPoint(holder.address, None, DEADLINE_S)
    assert forgotten.add("n", 1) == 1
    del forgotten
    gc.collect()
    assert guest.add("n", 1) == 2


def test_a_fork_finds_it_lost_and_ends_nothing(held):
    holder, guest = held

    def in_the_fork():
        for one in held:
            with pytest.raises(JoinPointLostError):
                one.add("n", 1)
            one.close()
        return 7

    assert forked.call(in_the_fork) == 7
    assert guest.add("n", 1) == holder.add("n", 0) == 1


def holding(address):
    """A process that holds the join point until it is ended; started by a fork that has no thread of its own yet."""
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            JoinPoint(address, None, DEADLINE_S)
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(0)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


@pytest.mark.parametrize("asks_meanwhile", [True, False])
def test_a_holder_that_is_killed(address, asks_meanwhile):
    pid = holding(address)
    guest = JoinPoint(address, None, DEADLINE_S)
    assert guest.add("n", 1) == 1
    os.kill(pid, signal.SIGKILL)
    if not asks_meanwhile:  # the next question finds no connection at all
        os.waitpid(pid, 0)
        leftovers.wait_until(lambda: guest._monitor.poll(0), "the connection is lost")
    with pytest.raises(JoinPointLostError):
        all(guest.add("n", 1) for _ in itertools.count())
    assert guest.lost
    if asks_meanwhile:
        os.waitpid(pid, 0)
    guest.close()


def test_a_holder_that_is_stopped_is_asked_once(address, monkeypatch):
    pid = holding(address)
    guest = JoinPoint(address, None, DEADLINE_S)
    monkeypatch.setattr(meetings, "_SLICE_S", 0.02)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # until then it may answer
    with pytest.raises(JoinPointLostError):
        guest.add("n", 1)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(JoinPointLostError):  # an answer that comes late is not the next question's
        guest.add("n", 1)
    guest.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_holder_that_dies_before_it_answers(address):
    """The next to come holds the address: a guest that had found the dead one is told nothing of keys."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as dying:

        def die():
            for _ in range(2):  # the guest looks whether anyone listens; then it dials
                dying.accept()[0].close()
            dying.close()

        thread = threading.Thread(target=die)
        thread.start()
        guest = JoinPoint(address, None, DEADLINE_S)
        thread.join()
    assert guest.holds
    assert guest.add("n", 1) == 1
    guest.close()


def test_nobody_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(meetings, "_CONNECT_S", 0.2)
    create_keys(tmp_path / "key")
    with pytest.raises(WorkerLostError, match=r"No answer from the join point 192\.0\.2\.1:29400 within 0 s"):
        JoinPoint("192.0.2.1:29400", tmp_path / "key", 0.0)


def test_signals_do_not_keep_it_from_freeing_everything(address):
    """As SIGCHLD's handler, which PyTorch's loaders have, did: descriptors and threads were left."""
    heard = 0

    def hear(*_):
        nonlocal heard
        heard += 1
        signal.setitimer(signal.ITIMER_REAL, 1e-4)  # from now on, so that the program goes on on a busy machine, too

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    try:
        for _ in range(20):
            holder = JoinPoint(address, None, DEADLINE_S)
            guest = JoinPoint(address, None, DEADLINE_S)
            assert guest.add("n", 1) == 1
            guest.close()
            holder.close()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard > 100


# Strangers


def test_garbage_reaches_nothing(held):
    holder, guest = held
    for data in (b"", b"\x01\x00", b"GET / HTTP/1.1\r\n\r\n" * 50, b"\xff" + bytes(8) + b"\x7f" + b"\x03" * 900):
        with socket.create_connection(("127.0.0.1", port_of(holder.address))) as raw:
            raw.sendall(data)
    assert guest.add("n", 1) == 1


def dealer(address, *, server=None, keys=None):
    context = zmq.Context()
    one = context.socket(zmq.DEALER)
    if server is not None:
        one.curve_serverkey, (one.curve_publickey, one.curve_secretkey) = server, keys
    one.connect(f"tcp://{address}")
    return context, one


@pytest.mark.parametrize("comes_with", ["no key", "a key of its own", "the run's public key alone"])
def test_without_the_key_nothing_is_answered_and_nothing_changes(held, comes_with):
    holder, guest = held
    server = {"no key": None, "a key of its own": zmq.curve_keypair()[0]}.get(comes_with, own_keys().public)
    context, stranger = dealer(holder.address, server=server, keys=zmq.curve_keypair())
    for _ in range(20):
        stranger.send(json.dumps(["add", "next batch", 10**12]).encode())
    assert not stranger.poll(300)
    assert guest.add("next batch", 4) == 4
    stranger.close(linger=0)
    context.term()


def test_another_key_is_one_sentence(held, tmp_path):
    create_keys(tmp_path / "key")
    with pytest.raises(UsageError, match="does not accept this key: all workers need the same --key"):
        JoinPoint(held[0].address, tmp_path / "key", DEADLINE_S)


def test_workers_that_the_kernel_would_keep_apart_are_told(held, monkeypatch):
    monkeypatch.setattr(meetings, "machine_of_this", lambda: "a container")
    with pytest.raises(UsageError, match="belong to other users or run in other containers: join at an address"):
        JoinPoint(held[0].address, None, DEADLINE_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_on_the_same_port_has_another_key(held):
    """Whose own runtime folder is not this one's, as after `su`."""
    holder, guest = held

    def come():
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        tempfile.tempdir = "/tmp"
        try:
            JoinPoint(holder.address, None, DEADLINE_S)
        except UsageError as error:
            return 7 if "does not accept this key" in str(error) else 8
        return 9

    assert forked.call(come) == 7
    assert guest.add("n", 1) == 1


# Holders of the key


@pytest.fixture
def member(held):
    """A bare socket that has the key."""
    context, one = zmq.Context(), None
    one = context.socket(zmq.DEALER)
    authenticate(one, own_keys())
    one.connect(f"tcp://{held[0].address}")
    yield one
    one.close(linger=0)
    context.term()


NONSENSE = [
    b"", b"{", b"[]", b"1", b"null", b'"add"', b"\xff\xfe", b"[" * 100_000, b'["add"]', b'["add", "n"]', b'["add", 1, 1]',
    b'["add", "n", "1"]', b'["add", "n", 1.5]', b'["add", "n", %d]' % 10**30, b'["add", "n", %d]' % -(2**53), b'["get", []]',
    b'["get", "none"]', b'["check", "n"]', b'["check", [[]]]', b'["set", "n"]', b'["set", "n", null]', b'["set", ["n"], "1"]',
    b'["compare_set", "n", "", 3]', b'["compare_set", "n"]', b'["eval", "n"]', b'[["add"], "n", 1]', b'["add", "n", 65]',
]  # fmt: skip


def test_nonsense_from_a_member_is_its_own_error(held, member):
    holder, guest = held
    guest.set("text", "words")
    for question in NONSENSE:
        member.send(question)
        assert member.poll(DEADLINE_S * 1e3), question
        assert json.loads(member.recv()) in ({}, False), question
    assert guest.add("n", 1) == holder.add("n", 0) == 1
    member.send_multipart([b'["add", ', b'"n", 1]'])
    assert json.loads(member.recv()) == 2


def test_a_question_that_is_too_long_ends_that_connection_only(held, member):
    member.send(b'["set", "n", "%s"]' % (b"x" * store._MOST_BYTES))
    assert not member.poll(200)
    assert held[1].add("n", 1) == 1


def test_the_store_has_an_end(held, monkeypatch):
    holder, guest = held
    monkeypatch.setattr(store, "_MOST_KEYS", 5)
    monkeypatch.setattr(store, "_MOST_COUNTS", 2)
    monkeypatch.setattr(store, "_MOST_STORED", 1000 + holder._point._num_stored)
    guest.set("a", "x" * 900)
    guest.set("a", "y" * 990)  # in its place
    another = JoinPoint(holder.address, None, DEADLINE_S)
    with pytest.raises(JoinPointLostError):
        another.set("b", "x" * 100)
    another.close()
    guest.set("a", "")
    for number in range(3):
        guest.set(f"k{number}", "1")
    another = JoinPoint(holder.address, None, DEADLINE_S)
    with pytest.raises(JoinPointLostError):
        another.set("one more", "1")
    another.close()
    assert guest.get("k2") == b"1"
    assert [guest.add("n", 1), guest.add("m", 2), guest.add("n", 1)] == [1, 2, 2]
    with pytest.raises(JoinPointLostError):
        guest.add("o", 1)


@pytest.mark.parametrize("amount", [-3000, -1, 65, 10**12])
def test_a_holder_of_the_key_moves_no_count_back_nor_far_forward(held, amount):
    """10^12 more, and a run ended at a third of its batches as if it had had all."""
    holder, guest = held
    assert holder.add("next batch", 64) == 64
    with pytest.raises(JoinPointLostError):
        guest.add("next batch", amount)
    assert holder.add("next batch", 4) == 68


def test_a_count_is_no_word_that_could_be_set(held):
    holder, guest = held
    holder.add("next batch", 4)
    guest.set("next batch", "1000000000000")
    assert guest.compare_set("next batch", "1000000000000", "garbage") == b"garbage"
    assert holder.add("next batch", 4) == 8


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"null", b"[]", b'"7"', b"true", b"1e3", b"%d" % 2**60, b"[" * 100_000, b"\xff"]
)
def test_an_answer_that_makes_no_sense_counts_as_none(address, answer):
    """From a holder of the key that talks to the point with another program."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = own_keys()
    router.bind(f"tcp://{address}")
    answers = iter([b"true", None, answer])

    def serve():
        for one in answers:
            sender, question = router.recv_multipart()
            router.send_multipart([sender, json.dumps(json.loads(question)[3]).encode() if one is None else one])

    thread = threading.Thread(target=serve)
    thread.start()
    guest = JoinPoint(address, None, DEADLINE_S)
    with pytest.raises(JoinPointLostError):
        guest.add("next batch", 4)
    assert guest.lost
    thread.join()
    guest.close()
    router.close(linger=0)
    context.term()


@pytest.mark.parametrize("value", ["[]", "{", '{"model": 1}', "7", "[" * 100_000])
def test_words_that_make_no_sense(held, value):
    held[0].set("hello", value)
    with pytest.raises(JoinPointLostError):
        held[1].agree_words("hello", {"model": "mlp"})


def test_many_strangers_at_once_do_not_make_it_grow(held):
    """Each connection is held for as long as a handshake may take, and none of what it sends is kept."""
    holder, guest = held

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    junk = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x01" + bytes(31) + b"\x04\xff" + bytes(60_000)

    def knock(times):
        for _ in range(times):
            raw = socket.create_connection(("127.0.0.1", port_of(holder.address)))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with raw:
                try:
                    raw.sendall(junk)
                except OSError:  # it was quick to hang up
                    continue

    knock(200)
    before = resident()
    knock(1000)
    assert guest.add("n", 1) == 1
    assert resident() - before < 20e6, "a third of what they sent"
