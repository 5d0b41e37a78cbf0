"""Expected times under kills against a small Monte Carlo, and against what follows without any arithmetic."""

import doctest
import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planner.failures import availability, expected_s


def restarted_s(random, work_s, kills_per_s, interval_s, restart_s):
    """One training, event by event: a kill at any time costs all since the last checkpoint, and a restart."""
    now_s, done_s, is_down = 0.0, 0.0, False
    while done_s < work_s:
        part_s = min(interval_s, work_s - done_s)
        needed_s = (restart_s if is_down else 0.0) + part_s
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
    seed=st.integers(0, 9),
)
def test_the_expected_time_is_that_of_many_trainings(work_s, kills_per_s, interval_s, restart_s, seed):
    """Only attempts after a kill begin with a restart, and a restart may be killed, too."""
    random = np.random.default_rng(seed)
    times_s = [restarted_s(random, work_s, kills_per_s, interval_s, restart_s) for _ in range(800)]
    expected = expected_s(work_s, kills_per_s=kills_per_s, interval_s=interval_s, restart_s=restart_s)
    assert expected == pytest.approx(np.mean(times_s), abs=4.5 * np.std(times_s) / math.sqrt(len(times_s)) + 1e-9)


def test_a_worker_is_away_for_its_restarts():
    random = np.random.default_rng(0)
    up_s = random.exponential(100.0, 20_000)
    share = availability(kills_per_s=0.01, restart_s=25.0)
    assert share == pytest.approx(up_s.sum() / (up_s + 25.0).sum(), rel=0.01)
    assert availability(kills_per_s=0.0, restart_s=25.0) == 1.0


def test_work_that_is_killed_before_every_checkpoint_never_ends():
    assert expected_s(1e6, kills_per_s=1.0, interval_s=1e6, restart_s=5.0) == math.inf


def test_the_doctests_hold():
    found = doctest.testmod(importlib.import_module("paceline.planner.failures"))
    assert found.failed == 0 < found.attempted
