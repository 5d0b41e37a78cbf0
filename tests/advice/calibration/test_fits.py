"""Slow workers, slow links and scattering steps that were put into measurements are found again, and nothing else is."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.advice.calibration.fits import compute_time, slow_links, slow_workers, typical_link
from paceline.advice.calibration.measurements import Link
from paceline.simulator.compute import ExponentialTail, Normal, Recorded


def steps(seed, factor=1.0, count=200, noise=0.03, spikes=0.02):
    """Steps of 10 ms and some noise; now and then one takes five times as long."""
    draw = random.Random(seed)
    return [0.01 * factor * draw.lognormvariate(0, noise) * (5 if draw.random() < spikes else 1) for _ in range(count)]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1.2, 1.5, 4.0, 0.5]), max_size=3), st.integers(0, 10**6), st.integers(4, 8))
def test_planted_slowness_is_found_and_no_other(factors, seed, ordinary):
    planted = [*factors, *[1.0] * ordinary]
    random.Random(seed).shuffle(planted)
    typical, found = slow_workers([steps(seed + index, factor) for index, factor in enumerate(planted)])
    assert planted[typical] == 1.0
    assert found == {worker: pytest.approx(factor, rel=0.05) for worker, factor in enumerate(planted) if factor != 1.0}


def test_three_percent_are_nobodys_slowness_and_neither_is_one_disturbance():
    assert slow_workers([steps(1), steps(2, 1.03), steps(3)])[1] == {}
    disturbed = steps(4)
    disturbed[:60] = [3 * one for one in disturbed[:60]]
    assert slow_workers([steps(1), disturbed, steps(3)])[1] == {}
    assert slow_workers([steps(1)]) == (0, {})
    assert slow_workers([steps(1), steps(2, 2.0)])[1] == {1: pytest.approx(2.0, rel=0.05)}, (
        "of two, the faster is usual"
    )
    assert slow_workers([steps(1, 3.0), steps(2)])[1] == {0: pytest.approx(3.0, rel=0.05)}


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_steps_that_scatter_alike_make_nobody_slow(noise):
    """With so much noise, medians of a few steps differ by over 5 % by chance."""
    found = [slow_workers([steps(9 * k + i, count=40, noise=noise) for i in range(3)])[1] for k in range(40)]
    assert sum(map(bool, found)) <= 2


def test_nearly_constant_steps_are_a_number():
    workers = [steps(index, factor, noise=0.02, spikes=0) for index, factor in enumerate([1.0, 1.0, 2.0])]
    compute_s = compute_time(workers, 0)
    assert compute_s == pytest.approx(statistics.median(workers[0]), rel=0.01)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(1e-4, 1.0), st.floats(0.1, 0.25), st.integers(0, 10**6))
def test_a_planted_normal_distribution_is_found_again(average_s, relative, seed):
    draw = random.Random(seed)
    workers = [
        [factor * abs(draw.normalvariate(average_s, relative * average_s)) for _ in range(600)]
        for factor in (1.0, 3.0, 1.0)
    ]
    model = compute_time(workers, 0)
    assert isinstance(model, Normal), model
    assert model.average_s == pytest.approx(average_s, rel=0.05)
    assert model.deviation_s == pytest.approx(relative * average_s, rel=0.2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(1e-4, 1.0), st.floats(0.2, 1.0), st.integers(0, 10**6))
def test_a_planted_tail_is_found_again(least_s, relative, seed):
    draw = random.Random(seed)
    workers = [[least_s * (1 + draw.expovariate(1 / relative)) for _ in range(2500)] for _ in range(2)]
    model = compute_time(workers, 0)
    assert isinstance(model, ExponentialTail), model
    assert model.mean_s == pytest.approx(least_s * (1 + relative), rel=0.05)
    assert model.least_s == pytest.approx(least_s, rel=0.1)


def test_what_no_distribution_fits_is_kept_as_it_was():
    """Every tenth step takes ten times as long: the median says nothing of it, and neither does a smooth tail."""
    worker = [0.01 * (10 if index % 10 == 9 else 1 + 0.001 * (index % 3)) for index in range(300)]
    model = compute_time([worker, [2 * one for one in worker]], 0)
    assert isinstance(model, Recorded)
    assert len(model.times_s) == 400
    assert model.mean_s == pytest.approx(statistics.fmean(worker), rel=0.05)
    assert model.times_s[9] == pytest.approx(0.1, rel=0.01)
    assert model.times_s[209] == pytest.approx(0.1, rel=0.01), "the slower worker's, in the median worker's time"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(3, 8),
    st.integers(0, 10**6),
    st.floats(1e-6, 1e-2),
    st.floats(1e6, 1e10),
    st.sampled_from([100, 10**5, 10**8]),
)
def test_planted_slow_links_are_found_and_no_other(number, seed, latency_s, bandwidth, message_bytes):
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(number) for b in range(a + 1, number)]
    factors = {pair: draw.choice([1.5, 10.0, 0.2]) for pair in draw.sample(pairs, (len(pairs) - 1) // 2)}
    links = {
        pair: Link(
            latency_s * (by := factors.get(pair, 1.0) * draw.uniform(0.96, 1.04)),
            bandwidth / by,
        )
        for pair in pairs
    }
    if all(factor > 1 for factor in factors.values()) or all(factor < 1 for factor in factors.values()):
        usual = typical_link(links)
        assert usual.latency_s == pytest.approx(latency_s, rel=0.05)
        assert usual.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.05)
    found = slow_links(links, message_bytes)
    assert found == {pair: pytest.approx(factor, rel=0.1) for pair, factor in factors.items()}


def test_a_link_that_is_slow_in_one_way_counts_as_much_as_it_matters_for_the_model():
    links = {(0, 1): Link(1e-4, 1e9), (0, 2): Link(1e-4, 1e9), (1, 2): Link(3e-4, 1e9)}
    assert slow_links(links, 10**8) == {}, "0.2 ms more, of a tenth of a second"
    assert slow_links(links, 10_000) == {(1, 2): pytest.approx(3.1e-4 / 1.1e-4, rel=1e-3)}
