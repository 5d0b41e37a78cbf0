"""Backup workers: order statistics against closed forms, the choice against what it must be, both against the simulator."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln
from scipy.stats import expon, pareto, truncnorm, uniform

import paceline as pl
from paceline.errors import UsageError
from paceline.planner.backup_times import steps_to_target
from paceline.planner.backups import plan_arrivals, plan_backups
from paceline.planner.order_statistics import RecordedTimes, step_times
from paceline.simulator import Cluster
from paceline.simulator.compute import ExponentialTail

WORKERS = st.integers(1, 40)
SECONDS = st.floats(1e-4, 100.0)


def means(law, factors):
    """E[T_(k)] for k = n, n - 1, ... 1."""
    return step_times(law, factors, len(factors) - 1)[:, 0].tolist()


def harmonic(n):
    return sum(1 / k for k in range(1, n + 1))


@settings(max_examples=15, deadline=None)
@given(WORKERS, SECONDS, SECONDS)
def test_exponential_times_have_harmonic_numbers(n, least_s, tail_s):
    expected = [least_s + tail_s * (harmonic(n) - harmonic(b)) for b in range(n)]
    assert means(expon(least_s, tail_s), [1.0] * n) == pytest.approx(expected, rel=1e-7)


@settings(max_examples=15, deadline=None)
@given(WORKERS, st.floats(0.1, 10.0))
def test_uniform_times_divide_the_interval_into_equal_parts(n, factor):
    expected = [factor * k / (n + 1) for k in range(n, 0, -1)]
    assert means(uniform(), [factor] * n) == pytest.approx(expected, rel=1e-7)


@settings(max_examples=15, deadline=None)
@given(WORKERS, SECONDS, st.floats(1.05, 6.0))
def test_pareto_times_have_quotients_of_gamma_functions(n, least_s, shape):
    expected = [
        least_s * math.exp(gammaln(n + 1) + gammaln(b + 1 - 1 / shape) - gammaln(b + 1) - gammaln(n + 1 - 1 / shape))
        for b in range(n)
    ]
    assert means(pareto(shape, scale=least_s), [1.0] * n) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(
        [expon(0.2, 1.0), truncnorm(-1 / 0.6, math.inf, 1.0, 0.6), pareto(1.7, scale=0.5), RecordedTimes([0.4])]
    ),
    st.lists(st.sampled_from([0.5, 1.0, 4.0, 100.0]), min_size=1, max_size=12),
)
def test_unlike_workers_order_statistics_add_up_to_their_means(law, factors):
    (own,) = means(law, [1.0])
    assert sum(means(law, factors)) == pytest.approx(own * sum(factors), rel=1e-6)
    assert means(law, factors) == sorted(means(law, factors), reverse=True)


@settings(max_examples=15, deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 4))
def test_recorded_times_are_counted_out(times_s, n):
    every = np.sort([list(row) for row in itertools.product(times_s, repeat=n)], axis=1).mean(axis=0)
    assert means(RecordedTimes(times_s), [1.0] * n) == pytest.approx(every[::-1].tolist(), rel=1e-9)


def test_the_exponential_minimum_of_unlike_workers_and_the_spread_of_steps():
    factors = [1.0, 2.0, 5.0]
    assert means(expon(0.0, 1.0), factors)[-1] == pytest.approx(1 / (1 + 1 / 2 + 1 / 5), rel=1e-8)
    (one,) = step_times(expon(0.0, 1.0), [1.0], 0)
    assert one[1:] == pytest.approx((-math.log(0.95), -math.log(0.05)), rel=0.03)


def test_a_worker_that_is_always_slow_is_worth_one_backup_and_equal_ones_none():
    law = RecordedTimes([0.1])
    slow = plan_backups(law, [1.0] * 15 + [10.0], half_efficient=math.inf)
    assert slow.best.backups == 1
    assert slow.best.time_relative.value == pytest.approx(16 / 15 / 10)
    assert slow.best.throughput_relative == pytest.approx(15 / 16 * 10)
    equal = plan_backups(law, [1.0] * 16)
    assert equal.best.backups == 0
    assert [row.steps_relative for row in equal.rows] == pytest.approx(
        [(1 + 411 / (16 - b)) / (1 + 411 / 16) for b in range(5)]
    )


def test_where_more_gradients_are_worth_nothing_the_first_is_enough_and_a_long_rest_makes_backups_pointless():
    law, factors = expon(0.2, 1.0), [1.0] * 8
    assert plan_backups(law, factors, half_efficient=0.0, max_backups=7).best.backups == 7
    assert plan_backups(law, factors, half_efficient=math.inf, max_backups=7).best.backups < 7
    assert plan_backups(law, factors, half_efficient=math.inf, max_backups=7, rest_s=100.0).best.backups == 0


def test_spare_machines_shorten_steps_of_as_many_gradients_and_must_earn_their_keep():
    law = expon(1.0, 0.5)
    plan = plan_backups(law, [1.0] * 4, spare=True, max_backups=3)
    assert [row.gradients_per_step for row in plan.rows] == [4] * 4
    assert [row.machines for row in plan.rows] == [4, 5, 6, 7]
    expected = [1.0 + 0.5 * (harmonic(4 + b) - harmonic(b)) for b in range(4)]
    assert [row.step_s.value for row in plan.rows] == pytest.approx(expected, rel=1e-7)
    paid = [(4 + b) / 4 * expected[b] / expected[0] for b in range(4)]
    assert [row.machine_time_relative for row in plan.rows] == pytest.approx(paid, rel=1e-7)
    assert plan.best.backups == int(np.argmin(paid))


def test_the_interval_of_recorded_times_holds_the_truth_as_often_as_it_says():
    law, n, hits = expon(1.0, 1.0), 6, 0
    truth = step_times(law, [1.0] * n, 1)[:, 0]
    for seed in range(30):
        times_s = 1.0 + np.random.default_rng(seed).exponential(1.0, 200)
        plan = plan_backups(RecordedTimes(times_s), [1.0] * n)
        hits += sum(row.step_s.low <= one <= row.step_s.high for row, one in zip(plan.rows, truth, strict=True))
        assert plan.sure is not None
    assert 0.8 <= hits / 60 <= 0.99


@pytest.mark.parametrize("b", [0, 2])
def test_the_simulator_s_steps_take_as_long(b):
    """Timing only, hardly any network. With backups a late worker begins its next step late, which costs a little more."""
    n, steps = 10, 200
    cluster = Cluster(workers=n, compute_s=ExponentialTail(least_s=1.0, tail_s=0.1), latency_s=0.0, wake_s=0.0)
    config = pl.TrainConfig(algorithm=f"parameter-server(mode=sync(backups={b}))", steps=steps, seed=5)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=100)
    rows = np.concatenate(list(run.records.values()))
    seen = np.diff([rows["ended_s"][rows["applied_version"] == version].min() for version in range(1, steps - 20)])
    expected = plan_backups(expon(1.0, 0.1), [1.0] * n).rows[b]
    error = 3 * seen.std() / math.sqrt(len(seen))
    held_over = 0.0 if b == 0 else 0.04
    assert expected.step_s.value - error <= seen.mean() <= (1 + held_over) * expected.step_s.value + error
    inside = np.mean((seen >= expected.steps_5_percent_s) & (seen <= expected.steps_95_percent_s))
    assert inside >= (0.84 if b == 0 else 0.6)


def test_many_workers_with_heavy_tails_want_a_few_backups():
    law = pareto(8.0, scale=1.4)
    plan = plan_backups(law, [1.0] * 300)
    assert len(plan.rows) == 76
    assert 5 <= plan.best.backups <= 60
    assert plan.best.backups in plan.within(0.02)


@pytest.mark.parametrize(
    ("factors", "options", "says"),
    [
        ([], {}, "at least 1 worker"),
        ([1.0, 0.0], {}, "factors above 0"),
        ([1.0], {"half_efficient": -1.0}, "half_efficient must be 0 or more"),
        ([1.0], {"half_efficient": math.nan}, "half_efficient must be 0 or more"),
        ([1.0, 1.0], {"rest_s": -1.0}, "0 seconds or more"),
        ([1.0, 1.0], {"max_backups": -1}, "0 or more, not -1"),
    ],
)
def test_refused(factors, options, says):
    with pytest.raises(UsageError, match=says):
        plan_backups(RecordedTimes([1.0]), factors, **options)


@pytest.mark.parametrize("times_s", [[], [1.0, 0.0], [math.nan], [math.inf]])
def test_times_that_are_none(times_s):
    with pytest.raises(UsageError, match="above 0 seconds"):
        RecordedTimes(times_s)


def test_a_step_takes_as_long_as_its_last_needed_gradient():
    arrivals_s = np.array([[4.0, 1.0, 2.0, 3.0], [1.0, 2.0, 9.0, 2.0]])
    choice = plan_arrivals(arrivals_s, half_efficient=math.inf, max_backups=3)
    assert [row.step_s.value for row in choice.rows] == [6.5, 2.5, 2.0, 1.0]
    assert [row.time_relative.value for row in choice.rows] == pytest.approx(
        [1, 2.5 * 4 / 3 / 6.5, 2.0 * 2 / 6.5, 4 / 6.5]
    )
    assert choice.best.backups == 1
    assert choice.rows[1].throughput_relative == pytest.approx(6.5 / 2.5 * 3 / 4)


def test_exponential_times_have_the_means_of_the_closed_form():
    M = 20
    arrivals_s = 1.0 + np.random.default_rng(1).exponential(0.5, (20_000, M))
    choice = plan_arrivals(arrivals_s, max_backups=M - 1)
    for row in choice.rows:
        N = M - row.backups
        expected = 1.0 + 0.5 * sum(1 / k for k in range(M - N + 1, M + 1))
        assert row.step_s.value == pytest.approx(expected, rel=0.01)


def test_equal_workers_need_no_backup_and_one_straggler_needs_one():
    even = np.ones((10, 8))
    assert plan_arrivals(even).best.backups == 0
    even[:, 3] = 5.0
    assert plan_arrivals(even).best.backups == 1
    even[:, 5] = np.inf  # never came
    choice = plan_arrivals(even)
    assert choice.best.backups == 2
    assert np.isinf(choice.rows[0].step_s.value)


def test_few_machines_may_have_one_backup_a_single_one_none_and_no_arrivals_are_refused():
    assert [row.backups for row in plan_arrivals(np.array([[1.0, 9.0, 1.0]])).rows] == [0, 1]
    assert [row.backups for row in plan_arrivals(np.array([[9.0]])).rows] == [0]
    with pytest.raises(ValueError, match="arrival times"):
        plan_arrivals(np.empty((0, 4)))
    with pytest.raises(UsageError, match="half_efficient must be 0 or more"):
        plan_arrivals(np.ones((1, 2)), half_efficient=-1)


def test_steps_nearly_halve_when_workers_double():
    assert 1.7 < steps_to_target(50) / steps_to_target(100) < 1.9
    assert steps_to_target(4, half_efficient=math.inf) == 0.25


def test_of_a_hundred_machines_with_rare_stragglers_three_to_eight_are_backups():
    from_seed = np.random.default_rng(0)
    arrivals_s = from_seed.gamma(100, 0.0152, (4000, 100))
    slow = from_seed.random((4000, 100)) < 0.01
    arrivals_s[slow] *= from_seed.pareto(1.1, int(slow.sum())) + 1
    choice = plan_arrivals(np.minimum(arrivals_s, 310.0))
    assert 3 <= choice.best.backups <= 8
    assert choice.rows[0].time_relative.value > 1.5 * choice.best.time_relative.value
