"""Mailboxes between real processes, some of which are killed, stopped, or come back."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistNetworkError, TCPStore

from paceline.errors import PeerLostError
from paceline.ports.ports import Message, PeerBack, PeerLeft, Received
from paceline.transport.connections import WINDOW
from paceline.transport.mailbox import ZmqMailbox
from processes.peers import DEADLINE_S, SILENCE_S, echo, floods, reads_late


class Lobby:
    """Where workers find each other, until it is closed."""

    def __init__(self):
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.store.port

    def close(self):
        self.store = None  # which ends its server


class GoneStore:
    """What is left of a store whose server has died: every use is counted, and an error."""

    def __init__(self):
        self.num_uses = 0

    def _use(self, *arguments):
        self.num_uses += 1
        raise DistNetworkError("Broken pipe")

    check = get = set = _use


@pytest.fixture(scope="module", autouse=True)
def _first_store():
    """The first one in a process opens a pipe that libuv keeps for all later ones."""
    Lobby().close()


@pytest.fixture
def lobby():
    lobby = Lobby()
    yield lobby
    lobby.close()


@pytest.fixture
def silence_s():
    """After which a peer has left; tests that stop one say how long they wait for that."""
    return DEADLINE_S


@pytest.fixture
def start(lobby, silence_s):
    """Starts echoing peers; ends those that a test leaves running."""
    context = multiprocessing.get_context("forkserver")
    processes = []

    def start(worker_id, num_workers, incarnation=0):
        process = context.Process(target=echo, args=(lobby.port, worker_id, num_workers, incarnation, silence_s))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        with suppress(ValueError):  # closed by the test
            process.kill()
            process.join()
            process.close()


@pytest.fixture
def mailbox(lobby, silence_s):
    """Worker 0's, which others expect with two workers more."""
    with ZmqMailbox(lobby.store, 0, 3, peer_deadline_s=silence_s) as mailbox:
        yield mailbox


def answer_of(mailbox, peer, number, x=None):
    mailbox.send(peer, Message("x", number, x=x))
    answer = mailbox.receive(DEADLINE_S, sender=peer)
    assert isinstance(answer, Received), answer
    assert (answer.sender, answer.message.number) == (peer, number)
    return answer


def everyone_answers(mailbox):
    """So everyone's `connect` has returned, and nobody still needs the others in order to begin."""
    for peer in (1, 2):
        answer_of(mailbox, peer, -1)


def test_messages_of_every_size_come_back_in_order(mailbox, start):
    start(1, 3)
    start(2, 3)
    mailbox.connect(DEADLINE_S)
    vectors = [None, torch.arange(25.0), torch.arange(10_000_000.0), torch.arange(1_000_000.0).bfloat16()]
    for number, x in enumerate(vectors * 2):
        for peer in (1, 2):
            mailbox.send(peer, Message("x", number, x=x))
    for peer in (1, 2):
        for number, x in enumerate(vectors * 2):
            message = mailbox.receive(DEADLINE_S, sender=peer).message
            assert message.number == number
            assert message.x is None if x is None else torch.equal(message.x, x)


def test_a_killed_peer_has_left_and_others_go_on(mailbox, start):
    victim, _ = start(1, 3), start(2, 3)
    mailbox.connect(DEADLINE_S)
    everyone_answers(mailbox)
    victim.kill()
    left = mailbox.receive(DEADLINE_S)
    assert isinstance(left, PeerLeft)
    assert (left.peer, left.incarnation) == (1, 0)
    assert left.reason != "ended"
    with pytest.raises(PeerLostError):
        mailbox.send(1, Message("x"))
    for number in range(20):
        answer_of(mailbox, 2, number, torch.ones(100_000))
    assert mailbox.peers() == {2}


def test_the_last_sign_of_life_is_not_later_than_a_death_that_is_read_late(lobby):
    """While many messages wait for a `receive`, the mailbox does not see the end of the connection behind them."""
    silence_s = 1.0
    sender = multiprocessing.get_context("forkserver").Process(target=floods, args=(lobby.port, silence_s))
    sender.start()
    with ZmqMailbox(lobby.store, 1, 2, peer_deadline_s=silence_s) as mailbox:
        mailbox.connect(DEADLINE_S)
        sender.join()
        died_s = time.monotonic()
        time.sleep(3 * silence_s)
        while not isinstance(mailbox.receive(DEADLINE_S), PeerLeft):
            pass
        assert mailbox.ends.heard_s(0) < died_s
    sender.close()


def test_a_peer_dies_that_has_sent_more_than_is_read(lobby):
    """ZeroMQ aborts a process if a connection whose queue is full has ended before it sends a heartbeat."""
    context, silence_s = multiprocessing.get_context("forkserver"), 4.0
    ours, theirs = context.Pipe()
    reader = context.Process(target=reads_late, args=(lobby.port, silence_s, theirs))
    sender = context.Process(target=floods, args=(lobby.port, silence_s))
    for process in (reader, sender):
        process.start()
    sender.join()
    assert sender.exitcode == 0
    reader.join(silence_s / 2)  # two heartbeats
    assert reader.exitcode is None
    ours.send("read")
    assert ours.poll(DEADLINE_S)
    assert ours.recv() >= WINDOW
    for process in (reader, sender):
        process.join()
        process.close()


def test_a_killed_peer_comes_back_to_others_that_do_not_ask_the_store_again(mailbox, start):
    victim, _ = start(1, 3), start(2, 3)
    mailbox.connect(DEADLINE_S)
    everyone_answers(mailbox)
    mailbox._directory._store = gone = GoneStore()
    for incarnation in (1, 2):
        victim.kill()
        assert mailbox.receive(DEADLINE_S)[:2] == (1, incarnation - 1)
        victim = start(1, 3, incarnation)
        assert mailbox.receive(DEADLINE_S) == PeerBack(1, incarnation)
        assert answer_of(mailbox, 1, incarnation).incarnation == incarnation
        answer_of(mailbox, 2, incarnation)
    assert gone.num_uses == 0


@pytest.mark.parametrize("silence_s", [SILENCE_S])
def test_a_stopped_peer_has_left_and_is_back_when_it_goes_on(mailbox, start):
    stopped = start(1, 3)
    start(2, 3)
    mailbox.connect(DEADLINE_S)
    everyone_answers(mailbox)
    for number in (1, 2):
        os.kill(stopped.pid, signal.SIGSTOP)
        left = mailbox.receive(DEADLINE_S, sender=1)
        assert left == PeerLeft(1, 0, f"its connection broke, or it gave no sign of life for {SILENCE_S:g} s")
        with pytest.raises(PeerLostError):
            mailbox.send(1, Message("x"))
        answer_of(mailbox, 2, number, torch.ones(100_000))
        os.kill(stopped.pid, signal.SIGCONT)
        assert mailbox.receive(DEADLINE_S, sender=1) == PeerBack(1, 0)
        answer_of(mailbox, 1, number)


@pytest.mark.parametrize("silence_s", [SILENCE_S])
def test_sending_to_a_stopped_peer_ends_with_an_error(mailbox, start):
    stopped = start(1, 3)
    start(2, 3)
    mailbox.connect(DEADLINE_S)
    everyone_answers(mailbox)
    os.kill(stopped.pid, signal.SIGSTOP)
    x = torch.ones(1_000_000)

    def send_on():
        for number in range(1000):
            mailbox.send(1, Message("x", number, x=x))

    with pytest.raises(PeerLostError):
        send_on()
    answer_of(mailbox, 2, 0)
    os.kill(stopped.pid, signal.SIGCONT)


def test_the_store_may_die_once_all_have_joined(mailbox, start, lobby):
    start(1, 3)
    start(2, 3)
    mailbox.connect(DEADLINE_S)
    everyone_answers(mailbox)
    mailbox._directory._store = gone = GoneStore()
    lobby.close()
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", lobby.port, timeout=timedelta(seconds=1))
    for number in range(10):
        for peer in (1, 2):
            answer_of(mailbox, peer, number, torch.ones(10_000))
    assert gone.num_uses == 0
