import os
import socket
import threading
from contextlib import suppress

import pytest
import torch
import zmq
from torch.distributed import HashStore

from leftovers import wait_until
from paceline.errors import PacelineError, PeerLostError, UsageError, WorkerLostError
from paceline.ports.ports import Counts, Message, PeerBack, PeerLeft, Received
from paceline.transport.connections import WINDOW, hello_vector
from paceline.transport.contexts import end_context
from paceline.transport.inbox import Inbox
from paceline.transport.keys import create_keys
from paceline.transport.mailbox import ZmqMailbox
from paceline.transport.wire import HEADER_BYTES, Sort, pack
from transport.conftest import DEADLINE_S, connect


def received(mailbox, **filters):
    found = mailbox.receive(DEADLINE_S, **filters)
    assert isinstance(found, Received), found
    return found


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_everyone_reaches_everyone(mailboxes, num_workers):
    all_of_them = mailboxes(num_workers)
    for sender, mailbox in enumerate(all_of_them):
        assert mailbox.peers() == frozenset(range(num_workers)) - {sender}
        for to in range(num_workers):
            mailbox.send(to, Message("hi", 10 * sender + to, 0.5, torch.full((sender + 1,), float(to))))
    for to, mailbox in enumerate(all_of_them):
        for sender in range(num_workers):
            message = received(mailbox, sender=sender).message
            assert message[:3] == ("hi", 10 * sender + to, 0.5)
            assert torch.equal(message.x, torch.full((sender + 1,), float(to)))
        assert mailbox.receive(0) is None


def test_messages_of_one_sender_keep_their_order(mailboxes):
    a, b = mailboxes(2)
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 3000, (300,), generator=draw).tolist()

    def send_all():
        for number, size in enumerate(sizes):
            a.send(1, Message("x", number, x=torch.full((size,), float(number)) if size else None))

    thread = threading.Thread(target=send_all)
    thread.start()
    for number, size in enumerate(sizes):
        message = received(b).message
        assert message.number == number
        assert (0 if message.x is None else message.x.numel()) == size
        assert message.x is None or bool((message.x == number).all())
    thread.join()


def test_a_vector_may_be_written_again_once_sent(mailboxes):
    a, b = mailboxes(2)
    x = torch.zeros(1_000_000)
    for number in range(8):
        x.fill_(number)
        a.send(1, Message("x", number, x=x))
        a.send(0, Message("own", number, x=x))
    x.fill_(-1)
    for mailbox in (b, a):
        for number in range(8):
            y = received(mailbox).message.x
            assert bool((y == number).all())
            y.add_(1)
    assert bool((x == -1).all())


def test_filters_leave_the_rest_for_later(mailboxes):
    a, b = mailboxes(2)
    for kind, number in (("x", 1), ("y", 1), ("x", 2)):
        a.send(1, Message(kind, number))
    assert received(b, kind="y").message == Message("y", 1)
    assert received(b, sender=0, number=2).message == Message("x", 2)
    assert received(b).message == Message("x", 1)
    assert b.receive(0.01, kind="x") is None


def test_counts_are_of_messages_to_others(mailboxes):
    a, b = mailboxes(2, counts=(counts := Counts()))
    a.send(1, Message("x", x=torch.zeros(10)))
    a.send(1, Message("x", x=torch.zeros(10_000)))
    a.send(1, Message("x"))
    a.send(0, Message("x", x=torch.zeros(10)))
    received(b)
    assert (counts.messages, counts.sent_bytes) == (3, 3 * HEADER_BYTES + 40 + 40_000)


def test_two_threads_receive_what_is_for_each(mailboxes):
    a, b = mailboxes(2)
    found = {"x": [], "y": []}

    def collect(kind):
        found[kind] += [received(b, kind=kind).message.number for _ in range(100)]

    threads = [threading.Thread(target=collect, args=(kind,)) for kind in found]
    for thread in threads:
        thread.start()
    for number in range(100):
        a.send(1, Message("x", number))
        b.send(1, Message("y", number))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == {"x": list(range(100)), "y": list(range(100))}


def test_a_message_to_itself_wakes_a_thread_that_waits(mailboxes):
    (alone,) = mailboxes(1)
    found = []

    def collect():
        found.extend(received(alone).message.number for _ in range(20))

    thread = threading.Thread(target=collect)
    thread.start()
    for number in range(20):
        wait_until(lambda: alone._reading, "it waits")
        alone.send(0, Message("turn", number))
    thread.join(DEADLINE_S)
    assert found == list(range(20))


def test_what_is_yet_to_be_said_does_not_wait_for_another_thread_that_reads(mailboxes, monkeypatch):
    a, b = mailboxes(2)
    reader, said_by = threading.Thread(target=lambda: received(a)), []
    reader.start()
    wait_until(lambda: a._reading, "it waits")
    monkeypatch.setattr(a._dialler, "catch_up", lambda peers: said_by.append(threading.get_ident()) or False)
    assert a.receive(0.0, kind="none such") is None
    assert threading.get_ident() in said_by
    b.send(0, Message("x"))
    reader.join(DEADLINE_S)


def test_leaving_is_told_after_the_last_message(mailboxes):
    a, b, c = mailboxes(3)
    for number in range(5):
        a.send(1, Message("x", number, x=torch.zeros(100_000)))
    a.close()
    assert [received(b).message.number for _ in range(5)] == list(range(5))
    assert b.receive(DEADLINE_S) == PeerLeft(0, 0, "ended")
    assert b.peers() == {2}
    with pytest.raises(PeerLostError, match=r"Worker 0 cannot be reached: it has ended\.") as caught:
        b.send(0, Message("x"))
    assert caught.value.peer == 0
    b.send(2, Message("x"))
    assert c.receive(DEADLINE_S, sender=1) == Received(1, 0, Message("x"))
    assert c.receive(DEADLINE_S) == PeerLeft(0, 0, "ended")


def test_a_worker_comes_back_as_its_next_incarnation(mailboxes, store):
    a, b = mailboxes(2)
    for incarnation in (1, 2):
        a.close()
        assert b.receive(DEADLINE_S) == PeerLeft(0, incarnation - 1, "ended")
        a = ZmqMailbox(store, 0, 2, incarnation=incarnation)
        try:
            a.connect(DEADLINE_S)
            assert b.receive(DEADLINE_S) == PeerBack(0, incarnation)
            a.send(1, Message("x", incarnation))
            assert b.receive(DEADLINE_S) == Received(0, incarnation, Message("x", incarnation))
            b.send(0, Message("y"))
            assert received(a).message == Message("y")
        finally:
            a.close()


def test_a_replacement_is_told_after_the_one_that_it_replaces(mailboxes, store):
    _, b = mailboxes(2)
    with ZmqMailbox(store, 0, 2, incarnation=1) as again:
        again.connect(DEADLINE_S)
        assert b.receive(DEADLINE_S) == PeerLeft(0, 0, "a new process has taken its place")
        assert b.receive(DEADLINE_S) == PeerBack(0, 1)


def test_the_end_of_one_incarnation_is_not_that_of_the_next(store):
    """Both are in the store when a peer looks for the first time."""
    ZmqMailbox(store, 1, 2).close()
    with ZmqMailbox(store, 1, 2, incarnation=1) as b, ZmqMailbox(store, 0, 2) as a:
        assert connect(a, b) == [None, None]
        assert a.peers() == {1}


def test_a_late_comer_is_told_of_and_reached_lazily(mailboxes, store):
    with ZmqMailbox(store, 0, 2) as a:
        a.connect(0.01, needs_all=False)
        with ZmqMailbox(store, 1, 2) as b:
            b.send(0, Message("x"))
            assert a.receive(DEADLINE_S) == PeerBack(1, 0)
            assert received(a).message == Message("x")


def looked(*mailboxes):
    """Each has looked for its peers once more: whoever must find some within a time is not to begin with that."""
    for one in mailboxes:
        one.connect(0.05, needs_all=False)
    return True


def test_peers_that_do_not_come_are_named(store):
    with ZmqMailbox(store, 0, 4) as a, ZmqMailbox(store, 2, 4) as b:
        wait_until(lambda: looked(a, b) and a.peers() == {2}, "they meet")
        error, _ = connect(a, b, timeout_s=2.0)
        assert isinstance(error, WorkerLostError)
        assert str(error) == "After 2 s workers 1 and 3 have not come."


def test_back_pressure_is_an_error_and_loses_nothing(mailboxes):
    a, b = mailboxes(2, send_deadline_s=1.0)
    x, sent = torch.zeros(1_000_000), []

    def send_on():
        while True:
            a.send(1, Message("x", len(sent), x=x))
            sent.append(len(sent))

    with pytest.raises(PeerLostError, match="has taken no message for 1 s"):
        send_on()
    assert WINDOW <= len(sent) < 1000  # it takes some in while nobody asks for them
    assert [received(b).message.number for _ in sent] == sent
    a.send(1, Message("x", -1))
    assert received(b).message.number == -1


def test_garbage_is_counted_and_dropped(mailboxes, store):
    a, b = mailboxes(2)
    endpoint = store.get("peer/1").decode().split()[1]
    with raw_connection(endpoint) as raw:
        raw.sendall(b"\xff" + bytes(8) + b"\x7f" + b"no such protocol, sorry" * 20)
        raw.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            while raw.recv(1000):  # until it hangs up
                pass
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    forged, _ = pack(Sort.MESSAGE, Message("forged"), 0, 0)
    hello, _ = pack(Sort.HELLO, Message("hello", x=torch.zeros(5, dtype=torch.uint8)), 0, 0)
    for frames in (
        [b"short"],
        [b"\0" * 200],
        [forged],
        [hello],
        [forged, b"x", b"y"],
        [b""],
        [forged[:-4] + b"\xff" * 4],
    ):
        stranger.send_multipart(frames)
    a.send(1, Message("good"))
    assert received(b).message == Message("good")
    while b.dropped < 7 or b.refused < 1:
        assert b.receive(0.05) is None
    stranger.close(linger=0)
    context.term()
    a.send(1, Message("still good"))
    assert received(b).message == Message("still good")
    assert (b.dropped, b.refused) == (7, 1)


def raw_connection(endpoint):
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(endpoint.removeprefix("ipc://"))
    return raw


def test_a_hello_in_the_first_zmtp_which_tells_no_connection_is_dropped(mailboxes, store):
    """68 bytes: an empty identity, and a frame with a hello in it."""
    a, b = mailboxes(2)
    hello, _ = pack(Sort.HELLO, Message("hello"), 0, 1)
    with raw_connection(store.get("peer/1").decode().split()[1]) as raw:
        raw.sendall(b"\x01\x00" + bytes([len(hello) + 1, 0]) + hello)
        while not b.dropped:
            assert b.receive(0.05) is None
    a.send(1, Message("still good"))
    assert received(b).message == Message("still good")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://:1", "tcp://127.0.0.1:*", "ipc://*",
        "ipc://socket", "ipc:///" + 200 * "x", "inproc://x", "udp://127.0.0.1:1", "tcp://no.such.host.at.all:1",
    ],
)  # fmt: skip
def test_a_hello_from_nowhere_is_its_senders_error(mailboxes, store, endpoint):
    """A peer that knows the run's name, so any of its members."""
    a, b, _ = mailboxes(3)
    hello, memory = pack(Sort.HELLO, Message("hello", 1, x=hello_vector(b._run, endpoint)), 2, 1)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(store.get("peer/1").decode().split()[1])
        stranger.send_multipart([hello] if memory is None else [hello, memory])
        a.send(1, Message("still good"))
        assert received(b).message == Message("still good")
        while not b.dropped and 2 in b.peers():
            b.receive(0.05)
        a.send(1, Message("and on"))
        assert received(b).message == Message("and on")
    context.term()


@pytest.mark.parametrize(
    "value",
    [
        "garbage", "", "0", "0 ", " ipc:///x", "-1 ipc:///proc/1/fd/1", f"{10**30} ipc:///proc/1/fd/1", "0 tcp://127.0.0.1:1",
        "x y z", "\x00\x00", "é è",
    ],
)  # fmt: skip
def test_what_makes_no_sense_in_the_store_is_nobodys_address_or_end(store, value):
    """Where another launcher holds it, strangers can write there."""
    with ZmqMailbox(store, 0, 2) as a:
        store.set("peer/1", value)
        if value != "0":  # an end, and no address
            store.set("ended/1", value)
        a.connect(0.1, needs_all=False)
        assert a.awaited() == {1}
        store.delete_key("ended/1")
        with ZmqMailbox(store, 1, 2) as b:
            assert connect(a, b) == [None, None]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a socket away")
def test_another_users_socket_is_not_dialled(store, tmp_path):
    """It would be told the run's name, and sent vectors."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as trap, ZmqMailbox(store, 0, 2) as a:
        trap.bind(f"ipc://{tmp_path}/trap")
        os.chown(tmp_path / "trap", 65534, 65534)
        store.set("peer/1", f"0 ipc://{tmp_path}/trap")
        a.connect(0.3, needs_all=False)
        assert not trap.poll(100)


def test_strangers_that_nobody_has_time_for_do_not_stop_the_sockets(tmp_path):
    """Each leaves a word for the mailbox, which is computing; more of them than a queue holds."""
    keys = create_keys(tmp_path / "key")
    context = zmq.Context()
    inbox = Inbox(context, "127.0.0.1", keys, 5.0)
    address = ("127.0.0.1", int(inbox.endpoint.rpartition(":")[2]))
    for _ in range(3000):
        with socket.create_connection(address) as raw:
            raw.sendall(b"\x01\x00" + bytes(60))
    with socket.create_connection(address, DEADLINE_S) as raw:
        assert raw.recv(1) == b"\xff", "it greets"
    inbox.close()
    context.term()


def test_closing_ends_a_receive_in_another_thread(mailboxes):
    a, _ = mailboxes(2)
    ends = []

    def wait():
        try:
            a.receive()
        except PacelineError as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    a.close()
    thread.join(DEADLINE_S)
    assert ends == ["This mailbox is closed."]
    with pytest.raises(PacelineError, match="closed"):
        a.send(0, Message("x"))


def test_mailboxes_that_close_together_wait_for_nobody():
    """A goodbye to a worker that has gone as well must not be waited for until `send_deadline_s`."""
    for _ in range(40):
        store = HashStore()
        made = [ZmqMailbox(store, worker, 3, send_deadline_s=10_000.0) for worker in range(3)]
        assert connect(*made) == [None] * 3
        threads = [threading.Thread(target=one.close) for one in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_with_the_same_key_they_talk(mailboxes, tmp_path):
    create_keys(tmp_path / "key")
    a, b = mailboxes(2, host="127.0.0.1", keys=tmp_path / "key")
    a.send(1, Message("secret", x=torch.ones(50_000)))
    assert received(b).message.x.sum() == 50_000


def test_with_another_key_or_none_they_do_not(store, tmp_path):
    for name in "ab":
        create_keys(tmp_path / name)
    a = ZmqMailbox(store, 0, 3, host="127.0.0.1", keys=tmp_path / "a")
    b = ZmqMailbox(store, 1, 3, host="127.0.0.1", keys=tmp_path / "b")
    c = ZmqMailbox(store, 2, 3)
    with a, b, c:
        wait_until(lambda: looked(a, b, c) and a.refused, "the others knock")
        errors = connect(a, b, c, timeout_s=2.0)
        assert [type(error) for error in errors] == [WorkerLostError] * 3
        assert str(errors[0]) == (
            "After 2 s workers 1 and 2 have come but do not answer. Do all workers have the same key file?"
        )


def test_a_peer_that_knows_only_the_public_key_is_not_let_in(mailboxes, store, tmp_path):
    keys = create_keys(tmp_path / "key")
    _, b = mailboxes(2, host="127.0.0.1", keys=tmp_path / "key")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = keys.public
    stranger.connect(store.get("peer/1").decode().split()[1])
    stranger.send(b"let me in")
    while not b.refused:
        assert b.receive(0.05) is None
    assert b.dropped == 0
    stranger.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "needs a key file"),
        ("127.0.0.1", "needs a key file"),
        ("0.0.0.0", "give the one address"),
        ("example", "give an IP address"),
        ("127.0.0.1.5", "give an IP address"),
    ],
)
def test_wrong_hosts_are_one_sentence(store, host, why):
    with pytest.raises(UsageError, match=why):
        ZmqMailbox(store, 0, 2, host=host)


def test_an_address_of_another_machine_is_one_sentence(store, tmp_path):
    create_keys(tmp_path / "key")
    with pytest.raises(UsageError, match=r"Cannot listen on 192\.0\.2\.1: .*Name an address of this machine\."):
        ZmqMailbox(store, 0, 2, host="192.0.2.1", keys=tmp_path / "key")


def test_closing_does_not_wait_for_ever():
    """A socket that is left open stands for whatever keeps libzmq from ending."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    end_context(context, -1.9)  # of the two seconds' margin
    assert not context.closed
    socket.close(linger=0)
    for thread in threading.enumerate():
        if thread.name == "mailbox-end":
            thread.join(DEADLINE_S)
    assert context.closed


@pytest.mark.parametrize("waits", [True, False])
def test_a_mailbox_whose_thread_has_failed_raises_its_error(mailboxes, monkeypatch, waits):
    """As when descriptors run out: the mailbox would answer no hello and dial no peer again."""
    mailbox, _ = mailboxes(2)

    def fails():
        raise OSError("too many open files")

    monkeypatch.setattr(mailbox, "_redial", fails)
    if not waits:
        mailbox._keeper.join(DEADLINE_S)
    with pytest.raises(PacelineError, match=r"no more messages, because .* failed \(OSError: too many open files\)"):
        mailbox.receive(DEADLINE_S)
