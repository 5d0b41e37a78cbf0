"""Planted effects are found as often as stated, planted nulls are not, and no run is dropped because it never arrived."""

import math

import numpy as np
import pytest

from paceline.study.statistics import (
    MIN_PAIRS,
    Times,
    adjusted_p_values,
    arrival_curve,
    log_ratios,
    median_estimate,
    paired_ratio,
    share_estimate,
)

PLANTED = 1.4


def arrived(times):
    times = np.asarray(times, dtype=np.float64)
    return Times(times, times)


def pairs_of_runs(random, repetitions, pairs, *, ratio, limit=math.inf, fail_share=0.0):
    """Repetitions of paired times: a seed's own difficulty, noise in each run, a limit, and runs that fail."""
    difficulty = random.gumbel(2.0, 0.4, (repetitions, pairs))
    noise = random.exponential(0.15, (2, repetitions, pairs))  # the ratio's logarithm is symmetric and has long tails
    times = np.exp(difficulty + noise) / np.array([1, ratio])[:, None, None]
    failed = random.random(times.shape) < fail_share
    reached = (times <= limit) & ~failed
    return [
        Times.of(np.where(r, t, np.nan), np.full(t.shape, limit), f)
        for t, r, f in zip(times, reached, failed, strict=True)
    ]


@pytest.mark.parametrize("pairs", [6, 7, 11, 20])
@pytest.mark.parametrize("limit", [math.inf, 11.0], ids=["all arrive", "a third stopped"])
def test_the_interval_covers_a_planted_ratio_as_often_as_stated(pairs, limit):
    random = np.random.default_rng(pairs)
    base, other = pairs_of_runs(random, 500, pairs, ratio=PLANTED, limit=limit)
    found = [paired_ratio(*log_ratios(base[row], other[row])) for row in range(500)]
    assert (np.mean(~base.reached) > 0.25) == math.isfinite(limit)
    assert np.mean([one.low <= PLANTED <= one.high for one in found]) >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / 500)
    assert all(one.low <= one.at_least <= one.at_most <= one.high for one in found)
    if limit == math.inf and pairs == 20:
        assert np.mean([one.low > 1 for one in found]) > 0.9  # and the effect is found
        assert np.median([one.at_least for one in found]) == pytest.approx(PLANTED, rel=0.03)


def test_dropping_pairs_with_a_stopped_run_would_be_biased_where_bounds_are_not():
    """The slow method's slow runs are those that are cut off: among the pairs left it looks less slow."""
    base, other = pairs_of_runs(np.random.default_rng(5), 500, 40, ratio=PLANTED, limit=6.5)
    low, high = log_ratios(base, other)
    complete = np.isfinite(low) & (low == high)
    dropped = [np.exp(np.median(ratios[kept])) for ratios, kept in zip(low, complete, strict=True)]
    assert np.mean(dropped) < 0.97 * PLANTED
    assert np.mean([one.low <= PLANTED <= one.high for one in map(paired_ratio, low, high)]) > 0.95


@pytest.mark.parametrize("pairs", [3, 5])
def test_few_complete_pairs_have_students_interval(pairs):
    random = np.random.default_rng(1)
    logs = random.normal(math.log(PLANTED), 0.2, (600, pairs))
    found = [paired_ratio(row, row) for row in logs]
    assert {one.method for one in found} == {"t"}
    assert np.mean([one.low <= PLANTED <= one.high for one in found]) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("pairs", [5, 6, 15])
def test_no_effect_is_found_where_there_is_none(pairs):
    base, other = pairs_of_runs(np.random.default_rng(2), 600, pairs, ratio=1.0, limit=20.0, fail_share=0.05)
    found = [paired_ratio(*log_ratios(base[row], other[row])) for row in range(600)]
    assert np.mean([not one.low <= 1 <= one.high for one in found]) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / 600)
    assert all((one.p_value <= 0.05) == (not one.low <= 1 <= one.high) for one in found)


def test_comparing_many_at_once_makes_few_false_findings():
    """24 comparisons, of which 4 have an effect: on average, at most 5 % of those that are named are false."""
    random = np.random.default_rng(3)
    false_shares, found = [], 0
    for _ in range(60):
        logs = random.normal(0, 0.15, (24, 15))
        logs[:4] += math.log(PLANTED)
        named = adjusted_p_values([paired_ratio(row, row).p_value for row in logs]) <= 0.05
        false_shares.append(named[4:].sum() / max(1, named.sum()))
        found += named[:4].sum()
    assert np.mean(false_shares) < 0.06
    assert found > 0.95 * 4 * 60
    assert len(adjusted_p_values([])) == 0


def test_a_run_that_never_arrives_is_not_dropped():
    base = Times.of(
        np.array([4.0, 4, 4, np.nan, np.nan, np.nan, np.nan]), np.full(7, 8.0), np.array([0, 0, 0, 0, 1, 1, 0], bool)
    )
    other = arrived([2.0] * 7)
    low, high = log_ratios(base, other)
    assert np.exp(low).tolist() == pytest.approx([2, 2, 2, 4, math.inf, math.inf, 4])
    assert np.exp(high).tolist() == pytest.approx([2, 2, 2, math.inf, math.inf, math.inf, math.inf])
    ratio = paired_ratio(low, high)
    assert (ratio.at_least, ratio.at_most) == (pytest.approx(4), math.inf)
    assert (ratio.low, ratio.pairs, ratio.complete) == (pytest.approx(2), 7, 3)


def test_a_pair_in_which_neither_arrived_counts_against_any_claim():
    failed = Times(np.full(3, np.inf), np.full(3, np.inf))
    low, high = log_ratios(failed, failed)
    assert np.isneginf(low).all()
    assert np.isposinf(high).all()
    clear = np.full(7, 0.5)
    assert paired_ratio(clear, clear).low > 1
    assert paired_ratio(np.concatenate([clear, low]), np.concatenate([clear, high])).low == 0
    undecided = paired_ratio(low, high)
    assert (undecided.at_least, undecided.at_most, undecided.p_value) == (0, math.inf, 1)


def test_a_run_stopped_before_the_other_arrived_says_nothing_of_which_was_sooner():
    low, high = log_ratios(Times(np.array([2.0]), np.array([np.inf])), arrived([5.0]))
    assert low[0] < 0 < high[0]


@pytest.mark.parametrize("pairs", range(1, MIN_PAIRS))
def test_five_unanimous_pairs_with_a_missing_arrival_are_no_finding(pairs):
    low, high = np.full(pairs, 1.0), np.full(pairs, 1.0)
    high[0] = np.inf
    ratio = paired_ratio(low, high)
    assert (ratio.method, ratio.low, ratio.high) == ("none", 0, math.inf)
    assert ratio.p_value > 0.05


def test_equal_simulated_times_are_no_finding_and_proportional_ones_are_exact():
    same = paired_ratio(np.zeros(5), np.zeros(5))
    assert (same.at_least, same.low, same.high, same.p_value) == (1, 1, 1, 1)
    double = paired_ratio(np.full(5, math.log(2)), np.full(5, math.log(2)))
    assert (double.low, double.high) == (pytest.approx(2), pytest.approx(2))
    assert paired_ratio(np.empty(0), np.empty(0)).pairs == 0
    assert paired_ratio(np.full(5, math.log(2)), np.full(5, math.log(2)), one_setting=False).low == 0


def test_arrivals_agree_with_a_published_analysis():
    """Remission times of 21 patients given 6-MP (Freireich et al. 1963), as in every textbook on survival."""
    reached = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    stopped = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    times = np.array(reached + [np.nan] * len(stopped))
    curve = arrival_curve(Times.of(times, np.array(reached + stopped, float), np.zeros(21, bool)))
    assert curve.at.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert (1 - curve.share).tolist() == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)
    assert (curve.median.value, curve.median.low, curve.median.high) == (23, 13, math.inf)  # R's conf.type="log-log"
    assert (curve.count, curve.arrived) == (21, 9)


def test_the_curve_of_complete_runs_is_the_share_that_arrived():
    times = np.random.default_rng(4).exponential(3.0, 40)
    curve = arrival_curve(arrived(times))
    assert curve.share.tolist() == pytest.approx([(at + 1) / 40 for at in range(40)])


def test_diverged_runs_keep_the_curve_from_reaching_one():
    times, ended = np.array([1.0, 2, np.nan, 4]), np.array([1.0, 2, 1.5, 4])
    diverged = arrival_curve(Times.of(times, ended, np.array([0, 0, 1, 0], bool)))
    assert diverged.share.tolist() == [0.25, 0.5, 0.75]
    stopped = arrival_curve(Times.of(times, ended, np.zeros(4, bool)))
    assert stopped.share.tolist() == pytest.approx([0.25, 0.625, 1.0])  # 1 - 3/4 x 1/2: two were left at 2 s


@pytest.mark.parametrize("count", [1, 5])
def test_where_nobody_arrived_the_median_is_unknown(count):
    curve = arrival_curve(Times(np.full(count, 3.0), np.full(count, np.inf)))
    assert (curve.arrived, curve.median.value, len(curve.at)) == (0, math.inf, 0)
    assert arrival_curve(arrived([2.0])).median.value == 2.0


def test_bootstrap_intervals_of_medians_cover_what_their_docstring_says():
    random = np.random.default_rng(6)
    for count, stated in ((5, 0.93), (30, 0.94)):
        found = [median_estimate(row) for row in random.normal(5, 1, (100, count))]
        assert np.mean([one.low <= 5 <= one.high for one in found]) == pytest.approx(stated, abs=0.06)


def test_medians_leave_out_what_was_not_measured():
    assert median_estimate([1.0, np.nan, 3.0]).value == 2
    alone = median_estimate([2.0])
    assert (alone.value, alone.count) == (2, 1)
    assert math.isnan(alone.low)
    assert median_estimate([]).count == 0
    assert median_estimate([3.0, 3.0]).high == 3
    assert median_estimate([1.0, 2.0, 7.0]) == median_estimate([1.0, 2.0, 7.0])


def test_shares_have_wilsons_interval():
    centre, half = (8 + 1.96**2 / 2) / (10 + 1.96**2), 1.96 * math.sqrt(0.8 * 0.2 * 10 + 1.96**2 / 4) / (10 + 1.96**2)
    estimate = share_estimate(8, 10)
    assert (estimate.low, estimate.high) == (
        pytest.approx(centre - half, abs=1e-4),
        pytest.approx(centre + half, abs=1e-4),
    )
    assert share_estimate(0, 0).high == 1
