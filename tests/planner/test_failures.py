"""Expected times under kills against a small Monte Carlo, and against what follows without any arithmetic."""

import doctest
import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.failures import availability, expected_s


def restarted_s(random, work_s, kills_per_s, interval_s, restart_s, checkpoint_s):
    """One training, event by event: a kill at any time costs all since the last checkpoint, and a restart."""
    now_s, done_s, is_down = 0.0, 0.0, False
    while done_s < work_s:
        part_s = min(interval_s, work_s - done_s)
        saved_s = checkpoint_s if done_s + part_s < work_s else 0.0
        needed_s = (restart_s if is_down else 0.0) + part_s + saved_s
        killed_s = random.exponential(1 / kills_per_s)
        if killed_s < needed_s:
            now_s, is_down = now_s + killed_s, True
        else:
            now_s, done_s, is_down = now_s + needed_s, done_s + part_s, False
    return now_s


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    work_s=st.floats(10.0, 100.0),
    kills_per_s=st.floats(0.001, 0.03),
    interval_s=st.floats(5.0, 40.0),
    restart_s=st.floats(0.0, 10.0),
    checkpoint_s=st.floats(0.0, 2.0),
    seed=st.integers(0, 9),
)
def test_the_expected_time_is_that_of_many_trainings(work_s, kills_per_s, interval_s, restart_s, checkpoint_s, seed):
    """Only attempts after a kill begin with a restart, and a restart may be killed, too."""
    random = np.random.default_rng(seed)
    times_s = [restarted_s(random, work_s, kills_per_s, interval_s, restart_s, checkpoint_s) for _ in range(800)]
    expected = expected_s(
        work_s, kills_per_s=kills_per_s, interval_s=interval_s, restart_s=restart_s, checkpoint_s=checkpoint_s
    )
    assert expected == pytest.approx(np.mean(times_s), abs=4.5 * np.std(times_s) / math.sqrt(len(times_s)) + 1e-9)


def test_a_worker_is_away_for_its_restarts():
    random = np.random.default_rng(0)
    up_s = random.exponential(100.0, 20_000)
    share = availability(kills_per_s=0.01, restart_s=25.0)
    assert share == pytest.approx(up_s.sum() / (up_s + 25.0).sum(), rel=0.01)
    assert availability(kills_per_s=0.0, restart_s=25.0) == 1.0


def test_without_kills_work_takes_its_time_and_its_checkpoints():
    assert expected_s(100.0, kills_per_s=0.0, interval_s=math.inf, restart_s=5.0) == 100.0
    assert expected_s(100.0, kills_per_s=0.0, interval_s=30.0, restart_s=5.0, checkpoint_s=1.0) == 103.0
    assert expected_s(1e6, kills_per_s=1.0, interval_s=math.inf, restart_s=5.0) == math.inf


@pytest.mark.parametrize(
    "wrong", [{"kills_per_s": -1.0}, {"restart_s": math.nan}, {"interval_s": 0.0}, {"work_s": math.inf}]
)
def test_nonsense_is_refused(wrong):
    arguments = {"work_s": 1.0, "kills_per_s": 0.1, "interval_s": 1.0, "restart_s": 1.0, **wrong}
    with pytest.raises(UsageError):
        expected_s(arguments.pop("work_s"), **arguments)


def test_the_doctests_hold():
    found = doctest.testmod(importlib.import_module("paceline.planner.failures"))
    assert found.failed == 0 < found.attempted
