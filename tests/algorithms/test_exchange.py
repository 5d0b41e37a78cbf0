"""Averages in pairs neither lose nor invent anything, however late answers are, whoever dies, whatever link breaks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.gossip_world import World
from algorithms.test_pairwise import INVITE, ONES, TURN, Averaging
from paceline.algorithms.topology import BipartiteExponential, Complete, Exponential, OnePeerExponential, Ring, Star
from paceline.ports.ports import Message, PeerBack, PeerLeft

GRAPHS = [
    (Ring(), 2),
    (Ring(), 3),
    (Ring(), 4),
    (Ring(), 5),
    (Ring(), 8),
    (Complete(), 3),
    (Complete(), 5),
    (Star(), 4),
    (BipartiteExponential(), 8),
    (Exponential(), 6),
    (OnePeerExponential(), 5),
    (OnePeerExponential(), 8),
]
TIMES_S = st.floats(0.0, 15.0)


@st.composite
def worlds(draw, graphs=GRAPHS, longest_delay_s=20.0):
    topology, workers = draw(st.sampled_from(graphs))
    return World(
        topology,
        workers,
        draw(st.integers(0, 2**32)),
        delay_s=draw(st.sampled_from([0.01, 0.1, 1.0, 5.0, longest_delay_s])),
        first_s=draw(st.sampled_from([0.001, 0.01, 0.1, 1.0, 10.0])),
        least_s=draw(st.sampled_from([0.0001, 0.01, 0.1, 1.0])),
        closes=draw(st.booleans()),
        steps=draw(st.sampled_from([1, 3, 12, 40])),
        peers=draw(st.sampled_from(["random", "rotate"])),
    )


def is_final(world):
    """Nobody's model has moved since its program said that it is over."""
    return all(torch.equal(one.x, one.final) for one in world.workers if one.over)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(worlds())
def test_the_sum_is_exact_however_late_answers_are(world):
    world.run()
    assert world.drift() < 1e-11
    assert not world.unpaired()
    assert world.count("unresolved_exchanges") == 0
    assert is_final(world)
    unhurried_s = world.delay_s + world.deadlines["first_s"] + 1.0  # a message, a deadline, the stay for the others
    assert all(one.ended_s - one.told_to_end_s < 3 * unhurried_s for one in world.workers)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds(), st.lists(st.tuples(TIMES_S, st.integers(0, 7)), min_size=1, max_size=3))
def test_what_survivors_exchange_is_whole_whoever_dies(world, deaths):
    for at_s, victim in deaths:
        world.at(at_s, world.kill, victim % len(world.workers))
    world.run()
    assert not world.unpaired()
    assert is_final(world)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    worlds(longest_delay_s=5.0),
    st.lists(st.tuples(TIMES_S, st.integers(0, 7), st.floats(0.0, 3.0)), min_size=1, max_size=3),
)
def test_it_is_whole_with_those_that_take_a_dead_workers_place(world, deaths):
    for at_s, victim, for_s in deaths:
        victim %= len(world.workers)
        world.at(at_s, world.kill, victim)
        world.at(at_s + for_s, world.replace, victim)
    world.run()
    assert not world.unpaired()
    assert is_final(world)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    worlds(graphs=[(Ring(), 2), (Ring(), 3), (Complete(), 4), (Ring(), 5)], longest_delay_s=5.0),
    st.lists(st.tuples(TIMES_S, st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=20),
)
def test_what_is_lost_with_a_connection_is_counted(world, breaks):
    """An answer that was under way cannot be made again: the worker that waits for it knows that, and says so."""
    workers = len(world.workers)
    for at_s, one, further in breaks:
        world.at(at_s, world.cut, one % workers, (one + further) % workers)
    world.run()
    assert len(world.unpaired()) <= world.count("unresolved_exchanges")
    assert is_final(world)
    assert all(
        one.ended_s - one.told_to_end_s < 60.0 for one in world.workers
    )  # a partner that has gone unseen for 30 s


def deliver(one, other):
    """What one has said to the other so far."""
    messages, one.box.messages = one.box.messages, []
    for to, message in messages:
        if to == other.me:
            other.hear(one.me, message)


@pytest.mark.parametrize("given_up_by", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("first", [0, 1])
def test_two_requests_that_cross_make_one_exchange_whichever_was_given_up(given_up_by, first):
    pair = Averaging(0, workers=3, x=4.0), Averaging(1, workers=3, x=8.0)
    for one, other in zip(pair, pair[::-1], strict=True):
        assert one.hear(other.me, INVITE)[1] == [(other.me, "request", 1)]
    for worker in given_up_by:
        assert pair[worker].waits(10.0)[0][1] == "withdraw"
    for one in pair:
        one.x -= 1.0  # a gradient, since the snapshots were made
    for one, other in ((pair[first], pair[1 - first]), (pair[1 - first], pair[first])) * 3:
        deliver(one, other)
    assert pair[0].x + pair[1].x == pytest.approx(torch.full((2,), 10.0, dtype=torch.float64))
    assert [one.counts.averages for one in pair] == [1, 1]
    assert [one.hear(one.me, TURN)[1][-1][1] for one in pair] == [
        "request",
        "request",
    ]  # nothing is left to be resolved


def test_a_late_answer_is_applied_and_teaches_the_deadline():
    one = Averaging(1, workers=2)
    for number in range(1, 9):
        begun_s = one.now_s
        assert one.hear(0, INVITE) == (10.0, [(0, "request", number)])
        assert one.waits(begun_s + 10.0) == [(0, "withdraw", number)]
        one.now_s = begun_s + 25.0
        before = one.x.clone()
        one.hear(0, Message("answer", number, x=before + 2.0))
        assert torch.equal(one.x, before + 1.0)
        assert one.hear(0, Message("answered", number)) == (math.inf, [])
    assert one.hear(0, INVITE)[0] == 25.0
    assert (one.counts.averages, one.counts.unresolved_exchanges) == (8, 0)


def test_few_requests_are_set_aside_however_many_partners_are_silent():
    """Each keeps a snapshot. Those whose partners have left make room for others, and are counted."""
    one, said = Averaging(0, Complete(), workers=12), []
    for _ in range(20):
        said += one.hear(0, TURN)[1]
        said += one.waits(one.now_s + 10.0)
    asked = [to for to, kind, _ in said if kind == "request"]
    assert len(asked) == len(set(asked)) == 4
    assert [kind for _, kind, _ in one.sees(PeerLeft(asked[1], 0, "killed"))] == ["request"]
    assert one.counts.unresolved_exchanges == 1


def test_a_partner_is_asked_again_once_it_is_known_what_became_of_the_last_request():
    one = Averaging(1, workers=2)
    one.hear(0, INVITE)
    one.waits(10.0)
    assert one.hear(0, INVITE) == (math.inf, [])
    assert one.hear(0, Message("busy", 1)) == (10.0, [(0, "request", 2)])


def test_an_answer_to_a_dead_workers_request_is_not_its_successors():
    one = Averaging(1, workers=2, incarnation=1)
    one.hear(1, TURN)
    one.hear(0, Message("answer", 1, x=ONES))
    assert one.x.tolist() == [0.0, 0.0]


def test_a_held_request_of_a_worker_that_has_left_is_not_answered():
    one = Averaging(2, workers=3)
    one.hear(0, INVITE)
    assert one.hear(1, Message("request", 7, x=ONES))[1] == []
    one.sees(PeerLeft(1, 0, "killed"))
    assert one.sees(PeerBack(1, 1)) == []
    assert one.hear(0, Message("answer", 1, x=ONES))[1] == []
    assert one.counts.averages == 1


@pytest.mark.parametrize("broken", [False, True])
def test_a_partner_that_goes_has_answered_nothing_unless_the_connection_was_broken(broken):
    one = Averaging(1, workers=2)
    one.hear(1, TURN)
    if broken:
        one.sees(PeerLeft(0, 0, "its connection broke"))
        assert one.sees(PeerBack(0, 0)) == [(0, "withdraw", 1)]
    one.hear(0, Message("gone"))
    assert one.counts.unresolved_exchanges == broken


def test_a_partner_that_could_not_be_told_what_became_of_its_request_is_told_when_it_is_back():
    one = Averaging(0, workers=2)
    one.hear(1, Message("request", 3, x=ONES))
    one.sees(PeerLeft(1, 0, "no sign of life"))
    assert one.hear(1, Message("withdraw", 3))[1] == []
    assert one.sees(PeerBack(1, 0)) == [(1, "answered", 3)]
    assert one.hear(1, Message("withdraw", 4))[1] == [(1, "busy", 4)]
