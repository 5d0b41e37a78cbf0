"""Which values belong together, where workers die and are replaced."""

import pytest

from paceline.membership.common_calls import CommonCalls


def all_of(calls):
    """All complete calls, as lists of workers in the order of their arrival."""
    found = []
    while parts := calls.take():
        assert all(value == f"of {worker}" for worker, value in parts.items())
        found.append(list(parts))
    return found


def bring(calls, epoch, *workers):
    for worker in workers:
        calls.bring(worker, epoch, f"of {worker}")
    return all_of(calls)


@pytest.fixture
def calls():
    """Three workers that have made the call of epoch 0; then worker 1 is replaced."""
    calls = CommonCalls(range(3))
    assert bring(calls, 0, 2, 0) == []
    assert bring(calls, 0, 1) == [[2, 0, 1]]
    calls.replace(1)
    return calls


def test_nobody_waits_for_a_replacement_without_a_batch(calls):
    assert bring(calls, 1, 0, 2) == [[0, 2]]
    assert bring(calls, 0, 1) == bring(calls, 1, 1) == [[1]]


def test_the_others_wait_for_it_from_its_first_batch_on(calls):
    assert bring(calls, 0, 1) == [[1]]
    calls.enter(1, 1)
    assert bring(calls, 1, 0, 2) == []
    assert bring(calls, 1, 1) == [[0, 2, 1]]


def test_it_is_alone_in_a_call_that_the_others_have_made(calls):
    assert bring(calls, 1, 0, 2) == [[0, 2]]
    calls.enter(1, 1)  # the rest of an epoch
    assert bring(calls, 1, 1) == []
    assert bring(calls, 2, 0) == [[1]]
    assert bring(calls, 2, 2) == []
    assert bring(calls, 2, 1) == [[0, 2, 1]]


def test_the_others_do_not_wait_if_it_is_ahead_of_them(calls):
    calls.enter(1, 2)
    assert bring(calls, 2, 1) == []
    assert bring(calls, 1, 0, 2) == [[0, 2]]
    assert bring(calls, 2, 0, 2) == [[1, 0, 2]]


def test_a_replacement_that_dies_too(calls):
    calls.enter(1, 1)
    bring(calls, 1, 0, 2)
    calls.replace(1)
    assert all_of(calls) == [[0, 2]]
    calls.enter(1, 2)
    assert bring(calls, 2, 2, 1, 0) == [[2, 1, 0]]


def test_only_replacements_are_left(calls):
    calls.replace(2)
    for worker in (1, 2):
        calls.enter(worker, 3)
    calls.leave(0)
    assert bring(calls, 3, 1) == []
    assert bring(calls, 3, 2) == [[1, 2]]


def test_a_worker_that_leaves_completes_a_call(calls):
    calls.enter(1, 1)
    assert bring(calls, 1, 0, 2) == []
    calls.leave(1)
    assert all_of(calls) == [[0, 2]]


def test_a_replacement_that_leaves_does_not_come_back(calls):
    calls.leave(1)
    calls.enter(1, 1)
    assert bring(calls, 1, 0, 2) == [[0, 2]]
