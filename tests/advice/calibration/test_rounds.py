"""Rounds of pairs: everybody meets everybody, and nobody is in two places at once."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.advice.calibration.rounds import link_rounds, round_robin, sample


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8])
def test_every_pair_meets_once_and_nobody_plays_twice_in_a_round(number):
    rounds = round_robin(number)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(number), 2))
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    assert len(rounds) == {1: 0, 2: 1, 3: 3, 4: 3, 5: 5, 8: 7}[number], "no round is wasted"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_no_machine_carries_two_tests_at_once(machines):
    rounds = link_rounds(machines)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(len(machines)), 2))
    for pairs in rounds:
        busy = [machine for a, b in pairs for machine in {machines[a], machines[b]}]
        assert len(busy) == len(set(busy)), (
            "a machine has one pair: two of its own, or one of its workers and another's"
        )


def test_a_machine_for_each_worker_is_a_round_robin_and_one_for_all_is_one_after_the_other():
    assert sorted(map(len, link_rounds([3, 1, 2, 0]))) == [2, 2, 2]
    assert [len(pairs) for pairs in link_rounds([0] * 5)] == [1] * 10


def test_a_sample_of_rounds_is_evenly_spread():
    rounds = round_robin(100)
    assert len(rounds) == 99
    assert sample(rounds, 99) == rounds
    found = sample(rounds, 33)
    assert found == rounds[::3]
