"""The protocol of comparisons, on runs that are made up: which rate comes next, which is used, and what is said."""

import importlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEVER = math.inf


@pytest.fixture(scope="module")
def protocol():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("protocol")


def searched(protocol, cost, start, **limits):
    """A whole search; `cost` is a run's, of its rate and seed."""
    tried = {}
    while trial := protocol.Rates(tried).next_trial(start, **limits):
        rate, seed = trial
        assert seed not in tried.get(rate, {}), "no run is made twice"
        tried.setdefault(rate, {})[seed] = cost(rate, seed)
    return protocol.Rates(tried)


def test_the_rate_that_is_used_is_the_largest_whose_worst_seed_arrives(protocol):
    def cost(rate, seed):
        return NEVER if rate > 0.4 or (rate > 0.3 and seed == 4) else abs(math.log2(rate / 0.1)) + 1

    found = searched(protocol, cost, (0.1, 0.2))
    assert (found.best, found.used) == (0.1, 0.2)
    assert sorted(found.tried) == [0.05, 0.1, 0.2, 0.4], "both sides of the best, and one that fails above"
    assert not found.at_edge
    assert len(found.tried[0.4]) == 5, "only its last seed fails"


@pytest.mark.parametrize("optimum", [0.01, 0.1, 1.0])
def test_the_grid_grows_until_the_best_is_inside(protocol, optimum):
    found = searched(
        protocol, lambda rate, _: NEVER if rate > 4 * optimum else abs(math.log2(rate / optimum)), (0.1, 0.2)
    )
    assert min(found.tried) < found.best < max(found.tried)
    assert found.used < max(found.tried)
    assert not found.at_edge


@given(limit=st.floats(1e-3, 10), best=st.floats(1e-3, 10), most=st.integers(3, 9))
def test_a_search_ends_within_its_budget_whatever_it_finds(protocol, limit, best, most):
    found = searched(
        protocol, lambda rate, _: NEVER if rate > limit else 1 + abs(math.log(rate / best)), (0.1, 0.2), most_rates=most
    )
    assert len(found.tried) <= most
    assert found.used is None or found.used <= limit
    if len(found.tried) < most:
        assert not found.at_edge


def test_without_a_target_the_best_rate_is_used_and_inside(protocol):
    tried = {}
    while trial := protocol.RatesAtEqualTime(tried).next_trial((0.1, 0.2)):
        tried.setdefault(trial[0], {})[trial[1]] = abs(math.log2(trial[0] / 0.8))
    found = protocol.RatesAtEqualTime(tried)
    assert (found.used, max(tried), found.at_edge) == (0.8, 1.6, False)


def test_where_no_rate_arrives_both_sides_are_tried(protocol):
    found = searched(protocol, lambda *_: NEVER, (0.1, 0.2), most_rates=6)
    assert sorted(found.tried) == pytest.approx([0.025, 0.05, 0.1, 0.2, 0.4, 0.8])
    assert all(len(costs) == 1 for costs in found.tried.values()), "a rate that failed once needs no other seed"
    assert (found.used, found.best, found.at_edge) == (None, None, True)


def test_an_interrupted_search_goes_on_where_it_was(protocol):
    tried = {0.1: {0: 3.0, 2: 3.0}}
    assert protocol.Rates(tried).next_trial((0.1, 0.2)) == (0.1, 1)


def test_the_interval_is_of_order_statistics(protocol):
    assert protocol.interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0, 1 - 2 / 32)
    assert protocol.interval([2.0]) == (2.0, 2.0, 0.0)
    assert protocol.interval([1.0, 2.0, 3.0]) == (1.0, 3.0, 0.75)
    low, high, level = protocol.interval([float(one) for one in range(1, 9)])
    assert (low, high) == (2.0, 7.0)
    assert level == pytest.approx(1 - 2 * 9 / 256)


@given(st.integers(5, 40))
def test_the_interval_is_the_narrowest_with_its_level(protocol, number):
    low, high, level = protocol.interval([float(one) for one in range(number)])
    assert low + high == number - 1
    assert level == pytest.approx(1 - 2 * sum(math.comb(number, one) for one in range(int(low) + 1)) / 2**number)
    narrower = 1 - 2 * sum(math.comb(number, one) for one in range(int(low) + 2)) / 2**number
    assert level >= 0.9 > narrower


def test_runs_that_do_not_arrive_count(protocol):
    assert protocol.said([1.0, 2.0, 3.0]) == "2.0 (1.0 to 3.0)"
    assert protocol.said([1.0, 2.0, NEVER]) == "2.0 (1.0 to never, 1 of 3 did not arrive)"
    assert protocol.said([1.0, NEVER, NEVER]) == "never (1.0 to never, 2 of 3 did not arrive)"
    assert protocol.said([NEVER]) == "did not arrive"
    assert protocol.said([0.5], 0, 100) == "50"
    assert protocol.said([]) == "-"


def test_a_method_that_overlaps_with_no_communication_is_not_sooner(protocol):
    assert protocol.sooner([1.0, 2.0], [2.5, 3.0])
    assert not protocol.sooner([1.0, 2.6], [2.5, 3.0])
    assert not protocol.sooner([1.0, NEVER], [2.5, 3.0])
    assert not protocol.sooner([1.0], [])


def test_bounds(protocol):
    assert protocol.transfer_s(25e6, 100.0) == 2.0
    assert protocol.perfect_sharing([1, 1, 1, 0.1]) == pytest.approx(4 / 3.1)


def test_runs_of_another_protocol_are_told(protocol, tmp_path):
    assert protocol.other_protocol([{"protocol": protocol.VERSION}, {}])
    assert not protocol.other_protocol([protocol.stamp({})])
    path = tmp_path / "runs.jsonl"
    assert protocol.read(path) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert protocol.read(path) == [{"a": 1}]


def test_a_line_that_was_cut_off_is_replaced(protocol, tmp_path):
    """A measurement that was killed as it wrote goes on, as often as it is."""
    path = tmp_path / "folder" / "runs.jsonl"
    for number in range(3):
        protocol.append(path, {"number": number})
        path.write_text(path.read_text() + '{"cut')
        assert [one["number"] for one in protocol.read(path)] == list(range(number + 1))
