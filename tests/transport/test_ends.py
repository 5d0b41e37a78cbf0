"""Which peers have certainly ended."""

import time

import pytest

from paceline.transport import ends
from paceline.transport.connections import Peer
from paceline.transport.ends import EndDetector

DEADLINE_S = 2.0


@pytest.fixture
def clock(monkeypatch):
    """A time that only the test moves."""
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def refusals(monkeypatch):
    """Endpoints at which no process listens."""
    found = set()
    monkeypatch.setattr(ends, "is_refused", found.__contains__)
    return found


def lost_peer(clock, ticks):
    """A peer whose connection is lost after `ticks` regular looks at it."""
    peer = Peer(1, incarnation=0, endpoint="there", welcomed=True, identity=b"1", met=True)
    detector = EndDetector({1: peer}, DEADLINE_S)
    for _ in range(ticks):
        clock[0] += 0.25
        detector.look()
    return detector, peer


def lose(detector, peer):
    detector.lose(peer)
    peer.forget_incoming()


def test_a_refusal_shows_the_end_of_a_peer_that_was_here_just_before(clock, refusals):
    detector, peer = lost_peer(clock, ticks=10)
    assert detector.heard_s(1) == clock[0]
    lose(detector, peer)
    assert detector.heard_s(1) == clock[0] - 0.5 - DEADLINE_S
    assert not detector.has_ended(1, 0), "its machine does not answer"
    refusals.add("there")
    assert detector.has_ended(1, 0)
    assert not detector.has_ended(1, 1)


def test_a_refusal_shows_nothing_about_a_peer_that_was_silent_for_long(clock, refusals):
    detector, peer = lost_peer(clock, ticks=10)
    lose(detector, peer)
    clock[0] += 4 * DEADLINE_S
    refusals.add("there")
    assert not detector.has_ended(1, 0)


def test_an_end_is_noticed_while_this_worker_computes(clock, refusals):
    detector, peer = lost_peer(clock, ticks=10)
    lose(detector, peer)
    refusals.add("there")
    detector.look()
    clock[0] += 1000
    assert detector.has_ended(1, 0)


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_process_that_was_stopped_does_not_know_how_long_others_have_been_gone(clock, refusals, looks):
    detector, peer = lost_peer(clock, ticks=10)
    clock[0] += 60
    for _ in range(looks):
        detector.look()
    refusals.add("there")
    lose(detector, peer)
    assert not detector.has_ended(1, 0)


@pytest.mark.parametrize(("refused", "silence_s", "died"), [(True, 0, 0), (True, 60, -1), (False, 0, -1)])
def test_a_successor_alone_does_not_show_that_a_peer_has_ended(clock, refusals, refused, silence_s, died):
    """Its place was taken because it could not be reached; it may train on with others."""
    detector, peer = lost_peer(clock, ticks=10)
    lose(detector, peer)
    clock[0] += silence_s
    refusals.update(["there"] if refused else [])
    detector.succeed(peer, 1, "elsewhere")
    assert (peer.died, peer.incarnation, peer.endpoint) == (died, 1, "elsewhere")
    assert detector.has_ended(1, 0) is (died == 0)
    assert not detector.has_ended(1, 1)


def test_a_peer_that_was_never_here_has_ended_if_it_is_refused(clock, refusals):
    peer = Peer(1, incarnation=0, endpoint="there")
    refusals.add("there")
    assert EndDetector({1: peer}, DEADLINE_S).has_ended(1, 0)


@pytest.mark.parametrize(("received", "ended"), [(0, False), (1, True)])
def test_a_peer_that_comes_back_is_heard_once_a_message_comes(clock, refusals, received, ended):
    """It may have gone on without this worker meanwhile, and says so first."""
    detector, peer = lost_peer(clock, ticks=10)
    lose(detector, peer)
    clock[0] += 60
    peer.heard(b"1", 2)
    for _ in range(10):
        clock[0] += 0.25
        detector.look()
    peer.received = received
    refusals.add("there")
    lose(detector, peer)
    assert detector.has_ended(1, 0) is ended
