"""Which workers take part in a round of messages, when one of them dies."""

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
    return lambda worker: SharedViews(segment, plan, worker)


def test_a_dead_worker_is_in_all_rounds_that_any_worker_has_begun(of):
    first, second, supervisor = of(0), of(1), of(SUPERVISOR)
    assert list(first.begin(0)) == list(second.begin(0)) == [0, 1, 2]
    assert list(first.begin(1)) == [0, 1, 2]
    supervisor.lose(2, is_dead=True)
    assert list(second.begin(1)) == [0, 1, 2]
    assert list(second.begin(2)) == list(first.begin(2)) == [0, 1]


def test_of_two_dead_workers_each_has_its_first_round(of):
    own, supervisor = of(0), of(SUPERVISOR)
    own.begin(0)
    supervisor.lose(2, is_dead=True)
    assert list(own.begin(1)) == [0, 1]
    supervisor.lose(1, is_dead=True)
    assert list(own.begin(1)) == [0, 1]
    assert list(own.begin(2)) == [0]


@pytest.mark.parametrize("asks", [lambda own: own.has_died(2), lambda own: list(own.begin(5)) == [0, 1]])
def test_a_worker_waits_until_the_supervisor_has_decided(asks, of, monkeypatch):
    """It looks between the mark and the number that follows it."""
    own, waits = of(0), []
    word = own._word("lost", 2)
    store(word, _UNDECIDED)
    store(own._news, 1)

    def decide(address, value):
        waits.append((address, value))
        store(word, 3)

    monkeypatch.setattr(views, "wait_briefly", decide)
    assert asks(own)
    assert waits == [(word, _UNDECIDED)]


def test_a_worker_that_has_left_is_not_dead(of):
    own, supervisor = of(0), of(SUPERVISOR)
    supervisor.lose(2, is_dead=False)
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
    supervisor.lose(2, is_dead=True)
    assert [list(own.living()) for _ in range(3)] == [[0, 1]] * 3
