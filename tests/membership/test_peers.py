"""A worker that takes a dead one's place needs one of the others at most, and none that has died or hangs."""

import math
import socket
import threading

import pytest

import forked
import leftovers
from paceline.errors import RunStopped
from paceline.membership.peers import Peers
from paceline.memory.segment import Layout, Segment
from paceline.memory.shared_store import SharedStore
from paceline.ports.ports import Counts
from paceline.transport.directory import mark_ended
from paceline.transport.mailbox import ZmqMailbox

DEADLINE_S = forked.AGAINST_HANGS_S


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr("paceline.membership.peers._LATE_CONNECT_S", 0.2)
    layout = Layout()
    offset = SharedStore.reserve(layout, 3)
    segment = Segment.create(layout.size_bytes)
    store = SharedStore(segment, offset, 3)
    store.begin()
    before = leftovers.everything()
    yield store
    leftovers.assert_nothing_new(before)
    segment.close()


@pytest.fixture
def silent(store):
    """An address where a worker listens that never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"  # connections are taken by the kernel, and kept waiting


def successor(store):
    """Worker 1 of 3."""
    return Peers(store, 1, 3, Counts(), lambda: False, incarnation=1)


def test_it_goes_on_without_one_that_hangs(store, silent):
    store.set("peer/2", f"0 {silent}")
    with ZmqMailbox(store, 0, 3):
        peers = successor(store)
        assert peers.mailbox.peers() == {0}
        peers.close()


def test_it_goes_on_alone_where_the_others_have_died(store, silent):
    for other in (0, 2):
        store.set(f"peer/{other}", f"0 {silent}")
        mark_ended(store, other, 0)
    peers = successor(store)
    assert peers.mailbox.peers() == frozenset()
    peers.close()


def test_it_waits_for_the_first_that_answers(store, silent):
    store.set("peer/2", f"0 {silent}")
    made = []
    thread = threading.Thread(target=lambda: made.append(successor(store)))
    thread.start()
    leftovers.wait_until(lambda: store.check(["peer/1"]), "worker 1 has come", DEADLINE_S)
    with ZmqMailbox(store, 0, 3):
        thread.join(DEADLINE_S)
        assert made[0].mailbox.peers() == {0}
        made[0].close()


def test_a_worker_is_not_waited_for_that_has_died_before_it_met_the_others(store, silent):
    """At the start of a run, where all are waited for."""
    store.set("peer/2", f"0 {silent}")
    made = []
    thread = threading.Thread(target=lambda: made.append(Peers(store, 1, 3, Counts(), lambda: False)))
    thread.start()
    with ZmqMailbox(store, 0, 3):
        leftovers.wait_until(lambda: store.check(["peer/1"]), "worker 1 has come", DEADLINE_S)
        mark_ended(store, 2, 0)
        thread.join(DEADLINE_S)
        assert made[0].mailbox.peers() == {0}
        made[0].close()


@pytest.mark.parametrize("incarnation", [0, 1])
def test_nobody_is_waited_for_in_a_run_that_is_being_stopped(store, silent, monkeypatch, incarnation):
    """Another has failed before it came: it never will, and the run ends at once."""
    monkeypatch.setattr("paceline.membership.peers._STORE_DEADLINE_S", math.inf)
    monkeypatch.setattr("paceline.membership.peers._LATE_CONNECT_S", math.inf)
    looks = iter([False, False])
    with pytest.raises(RunStopped):
        Peers(store, 1, 3, Counts(), lambda: next(looks, True), incarnation=incarnation)
    assert next(looks, None) is None
