"""Which workers take part in a round of messages, when one of them dies or is replaced."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import WorkerLostError
from paceline.memory import views
from paceline.memory.atomics import store
from paceline.memory.segment import Layout, Segment
from paceline.memory.views import _UNDECIDED, SharedViews

SUPERVISOR = 3


@pytest.fixture
def of():
    """Makes the view of a worker, or of the supervisor, which observes."""
    layout = Layout()
    plan = SharedViews.reserve(layout, 1, 3)
    segment = Segment.create(layout.size_bytes)
    return lambda worker, incarnation=0: SharedViews(segment, plan, worker, incarnation)


def test_a_dead_worker_is_in_all_rounds_that_any_worker_has_begun(of):
    first, second, supervisor = of(0), of(1), of(SUPERVISOR)
    assert list(first.begin(0)) == list(second.begin(0)) == [0, 1, 2]
    assert list(first.begin(1)) == [0, 1, 2]
    supervisor.mark_lost(2, is_dead=True)
    assert list(second.begin(1)) == [0, 1, 2]
    assert list(second.begin(2)) == list(first.begin(2)) == [0, 1]


def test_of_two_dead_workers_each_has_its_first_round(of):
    own, supervisor = of(0), of(SUPERVISOR)
    own.begin(0)
    supervisor.mark_lost(2, is_dead=True)
    assert list(own.begin(1)) == [0, 1]
    supervisor.mark_lost(1, is_dead=True)
    assert list(own.begin(1)) == [0, 1]
    assert list(own.begin(2)) == [0]


def test_a_worker_that_had_left_before_it_died_is_in_all_rounds(of):
    own, supervisor = of(0), of(SUPERVISOR)
    own.begin(0)
    supervisor.mark_lost(2)
    supervisor.mark_lost(2, is_dead=True)
    assert supervisor.end_of(2)["first_without"] == 1


def test_a_worker_waits_until_the_supervisor_has_decided(of, monkeypatch):
    """It looks between the mark and the number that follows it."""
    own, waits = of(0), []
    word = own._word("lost", 2)
    store(word, _UNDECIDED)
    store(own._news, 1)

    def decide(address, value):
        waits.append((address, value))
        store(word, 3)

    monkeypatch.setattr(views, "wait_briefly", decide)
    assert list(own.begin(5)) == [0, 1]
    assert waits == [(word, _UNDECIDED)]


def test_a_worker_waits_for_news_of_a_peer(of, monkeypatch):
    own, supervisor = of(0), of(SUPERVISOR)
    monkeypatch.setattr(views, "wait_briefly", lambda *_: supervisor.mark_lost(2, is_dead=True))
    assert own.has_died(2)


def test_a_worker_that_has_left_is_not_dead(of):
    own, supervisor = of(0), of(SUPERVISOR)
    supervisor.mark_lost(2)
    assert not own.has_died(2)
    assert list(own.begin(0)) == [0, 1, 2]
    of(1).begin(1)
    with pytest.raises(WorkerLostError, match="Worker 2 has left"):
        own.living()


def test_a_worker_may_ask_again_who_is_alive(of):
    own, other, supervisor = of(0), of(1), of(SUPERVISOR)
    other.begin(0)
    other.begin(1)
    own.begin(0)
    supervisor.mark_lost(2, is_dead=True)
    assert [list(own.living()) for _ in range(3)] == [[0, 1]] * 3


def together(workers, newcomers):
    """Lets newcomers in, as all workers do between the same two rounds; returns what the first one gives."""
    with ThreadPoolExecutor(len(workers)) as pool:
        assert len({tuple(members) for members in pool.map(SharedViews.living, workers)}) == 1
    given, *_ = [one.let_in(newcomers) for one in workers]
    return given


def test_all_learn_of_newcomers_before_the_round_in_which_they_come(of):
    first, second, supervisor = of(0), of(1), of(SUPERVISOR)
    first.begin(0)
    second.begin(0)
    supervisor.mark_lost(2, is_dead=True)
    first.begin(1)
    first.announce({2: 1})
    first.announce({2: 2})  # has no effect: the others may know of the first one
    assert second.coming(1) == first.coming(2) == {}
    second.begin(1)
    first.begin(2)
    second.begin(2)
    assert first.coming(3) == second.coming(3) == {2: 1}
    assert first.coming(4) == second.coming(4) == {}
    newcomer = of(2, 1)
    newcomer.enter(together([first, second], {2: 1}))
    assert list(newcomer.living()) == list(first.living()) == list(second.living()) == [0, 1, 2]
    assert list(first.begin(3)) == list(second.begin(3)) == list(newcomer.begin(3)) == [0, 1, 2]
    supervisor.mark_lost(2, 1, is_dead=True)
    assert list(newcomer.begin(4)) == list(first.begin(4)) == [0, 1]


def test_a_worker_that_looks_before_the_round_of_newcomers_is_decided_decides_it(of, monkeypatch):
    """Even if the first worker dies meanwhile."""
    first, second = of(0), of(1)
    first.begin(0)
    second.begin(1)
    monkeypatch.setattr(views, "compare_and_swap", lambda *_: None)
    first.announce({2: 1})
    monkeypatch.undo()
    assert second.coming(2) == {}
    second.begin(2)
    assert second.coming(3) == first.coming(3) == {2: 1}


def test_others_begin_rounds_while_the_first_worker_decides(of, monkeypatch):
    """They find the mark, and decide in its place."""
    first, second, seen = of(0), of(1), []
    first.begin(0)
    second.begin(0)
    newest = first._newest

    def slowly():
        found = newest()
        for k in range(1, 4):
            seen.append(second.coming(k))
            if seen[-1]:
                break
            second.begin(k)
        return found

    monkeypatch.setattr(first, "_newest", slowly)
    first.announce({2: 1})
    assert seen == [{}, {2: 1}]
    assert [first.coming(k) for k in (1, 2)] == seen


@pytest.mark.parametrize("enters", [False, True])
def test_a_newcomer_that_dies_as_it_is_let_in_does_not_come(enters, of):
    first, second, supervisor = of(0), of(1), of(SUPERVISOR)
    for one in (first, second):
        one.begin(0)
    supervisor.mark_lost(2, is_dead=True)
    for one in (first, second):
        one.begin(1)
    given, newcomer = together([first, second], {2: 1}), of(2, 1)
    if enters:
        newcomer.enter(given)
    supervisor.mark_lost(2, 1, is_dead=True)
    assert supervisor.is_dead(2, 1)
    assert list(first.living()) == list(second.living()) == [0, 1]
    assert list(first.begin(2)) == list(second.begin(2)) == [0, 1]
