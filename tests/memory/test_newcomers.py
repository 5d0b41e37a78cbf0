"""How replacements of dead workers ask for their places, in threads of one process."""

import threading

import pytest

from paceline.errors import NotReplacedError, RunStopped
from paceline.memory.atomics import load
from paceline.memory.newcomers import _ASKS, SharedNewcomers
from paceline.memory.segment import Layout, Segment
from paceline.memory.waiting import wait_briefly
from paceline.ports.newcomers import Refusal


@pytest.fixture
def of():
    """Makes the view of a worker in one of its incarnations."""
    layout = Layout()
    plan = SharedNewcomers.reserve(layout, 1, 2)
    segment = Segment.create(layout.size_bytes)
    return lambda worker, incarnation=0: SharedNewcomers(segment, plan, worker, incarnation)


class Asking(threading.Thread):
    """A newcomer that waits; `found` is what it got, or the error."""

    def __init__(self, newcomers, incarnation=1, epoch=0, newest=lambda: 0, is_over=lambda: False, dead=()):
        super().__init__()
        self.newcomers, self.arguments = newcomers, (epoch,)
        self.options = {"newest": newest, "is_over": is_over, "is_dead": lambda *who: who in dead}
        self.start()
        address = newcomers._at(newcomers._worker_id, _ASKS)
        while self.is_alive() and load(address) != 2 * incarnation:
            wait_briefly(address, 0)

    def run(self):
        try:
            self.found = self.newcomers.enter(*self.arguments, **self.options)
        except (NotReplacedError, RunStopped) as error:
            self.found = error

    def result(self):
        self.join(20)
        assert not self.is_alive()
        return self.found


def test_a_newcomer_gets_what_the_first_worker_gives(of):
    first, newcomer = of(0), of(1, 1)
    asking = Asking(newcomer)
    assert first.accepted(0) == {1: 1}
    assert not first.has_entered(1, 1)
    first.let_in({1: 1}, 0)
    first.give({1: 1}, {"step": 7})
    assert asking.result() == {"step": 7}
    assert first.has_entered(1, 1)
    assert (first.accepted(0), first._files) == ({}, {})  # it has read


def test_it_is_not_accepted_in_another_epoch_and_steps_back_if_the_others_are_in_a_later_one(of):
    first, newest = of(0), [0]
    asking = Asking(of(1, 1), newest=lambda: newest[0])
    assert first.accepted(1) == {}
    newest[0] = 1
    assert asking.result() is None
    assert first.accepted(1) == {}


def test_once_accepted_it_does_not_step_back(of):
    first, newest = of(0), [0]
    asking = Asking(of(1, 1), newest=lambda: newest[0])
    assert first.accepted(0) == {1: 1}
    newest[0] = 1
    assert of(0).accepted(1) == {1: 1}  # by the worker that is first if that one has died
    first.let_in({1: 1}, 0)
    first.give({1: 1}, {})
    assert asking.result() == {}


def test_a_refusal_says_why(of):
    first = of(0)
    asking = Asking(of(1, 1))
    first.refuse(first.accepted(0), Refusal.SCALED)
    assert asking.result().why == Refusal.SCALED.why


def test_what_is_given_to_one_that_has_died_is_not_its_successors(of):
    """The second one asks before the others let the first one in, which they had accepted."""
    first, is_dead = of(0), []
    dead = Asking(of(1, 1), is_over=lambda: bool(is_dead))
    assert first.accepted(0) == {1: 1}
    is_dead.append(True)
    assert isinstance(dead.result(), RunStopped)
    asking = Asking(of(1, 2), incarnation=2)
    first.let_in({1: 1}, 0)
    first.give({1: 1}, {"for": 1})
    assert not first.has_entered(1, 2)
    assert first.accepted(0) == {1: 2}
    first.let_in({1: 2}, 0)
    first.give({1: 2}, {"for": 2})
    assert asking.result() == {"for": 2}


def test_a_newcomer_does_not_wait_for_a_giver_that_has_died(of):
    first, dead = of(0), []
    asking = Asking(of(1, 1), dead=dead)
    first.let_in(first.accepted(0), 0)
    dead.append((0, 0))
    assert asking.result().can_try_again


def test_a_newcomer_ends_if_the_others_have(of):
    assert isinstance(Asking(of(1, 1), is_over=lambda: True).result(), RunStopped)
