"""The page on times and their lower bound: its arithmetic, its search of steps, and a whole page, small."""

import importlib
import math
from pathlib import Path

import pytest

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FIDELITY))
    monkeypatch.setenv("WORST_QUADRATIC_EVERY", "4")
    return importlib.import_module("time_lower_bound")


def test_the_line_waits_for_as_many_as_are_worth_it(script):
    assert script.bound([1.0] * 4, 10.0, 4.0) == pytest.approx(20.0)
    assert script.bound([1.0, 1.0, 1000.0], 1.0, 4.0) == pytest.approx(1 + 4 / 2)
    assert script.bound([1.0, 1.0, 2.0], 1.0, 4.0) == pytest.approx(3 / 2.5 * (1 + 4 / 3))
    assert script.bound([1.0, 1e9], 1.0, 0.0) == pytest.approx(1.0), "without noise one is enough"


def test_steps_wait_for_no_worker_that_costs_more_than_its_gradient_is_worth(script):
    assert script.worth_waiting_for([1.0] * 15 + [10.0], 16.0) == 15
    assert script.worth_waiting_for([1.0, 1.01], 16.0) == 2
    assert script.worth_waiting_for([1.0] * 3, 0.0) == 1


@pytest.mark.parametrize("profile", ["one slow", "half slow", "square root", "heavy tails"])
def test_workers_are_in_the_order_of_their_times(script, profile):
    found = script.times(profile, 100, 8)
    assert found == sorted(found)
    assert len(found) == 8
    if profile != "heavy tails":
        assert (found[0], found[-1]) == (1.0, 100.0)


class _MadeUp:
    """Runs that arrive soonest with one step, and diverge from 1 on."""

    def __init__(self, script, best):
        self.size, self.first_rate, self.tried, self._best, self._outcome = script.Size(), 0.4, [], best, script.Outcome

    def run(self, spec, machines, rate, seed):
        self.tried.append(rate)
        if rate >= 1.0:
            return self._outcome(math.inf, math.inf)
        return self._outcome(100.0 * (1 + abs(math.log2(rate / self._best))), 0.0)


@pytest.mark.parametrize("best", [0.05, 0.1, 0.3, 0.8])
def test_the_search_comes_near_the_best_step_with_as_many_tries_as_are_allowed(script, best):
    bench = _MadeUp(script, best)
    time_s, rate = script.Bench._best(bench, "any", None, 0.4, 6)
    assert len(set(bench.tried)) == 6
    assert 0.7 < rate / best < 1.42
    assert time_s == pytest.approx(100.0 * (1 + abs(math.log2(rate / best))))


def test_a_small_page_has_every_method_in_every_table(script):
    lines = script.measured(script.SMALL)
    for method in script.METHODS:
        assert sum(line.startswith(f"| {method.name} |") for line in lines) == 2
    assert any("lower bound's shape" in line and line.startswith("| ") for line in lines)
    assert sum(line.startswith("Control: ") for line in lines) == 2
    assert lines[-3] == "## Where is asynchrony needed?"
