"""The noise scale against gradients whose mean and covariance are known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.noise_scale import noise_scale, squared_norms


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 64), st.integers(2, 16))
def test_expected_norms_give_the_planted_figures(gradient, trace, batch, workers):
    small, big = gradient + trace / batch, gradient + trace / (batch * workers)
    found = noise_scale([small] * 3, [big] * 3, small_batch=batch, big_batch=batch * workers)
    assert found.squared_gradient == pytest.approx(gradient, rel=1e-6, abs=1e-9 * trace)
    assert found.trace == pytest.approx(trace, rel=1e-6, abs=1e-6 * gradient * batch)
    scale = found.batch_size.value
    for size in (1, batch, 1000):
        assert (found.steps_factor(size) - 1) * (found.examples_factor(size) - 1) == pytest.approx(1)
        assert size * found.steps_factor(size) == pytest.approx(scale * found.examples_factor(size))


def drawn(random, steps, workers, batch, G, deviation):
    """Both squared norms of each step, from workers' gradients of independent samples."""
    shape = (steps, workers, len(G))
    gradients = G + deviation / math.sqrt(batch) * random.standard_normal(shape)
    return np.array([squared_norms(step) for step in gradients]).T


def test_both_estimates_are_unbiased_and_the_interval_holds_the_truth():
    random = np.random.default_rng(0)
    G, deviation = np.full(50, 0.1), np.linspace(0.1, 2.0, 50)
    truth = np.array([G @ G, deviation @ deviation])
    estimates, inside = [], []
    for _ in range(200):
        found = noise_scale(*drawn(random, 60, 4, 8, G, deviation), small_batch=8, big_batch=32)
        estimates.append([found.squared_gradient, found.trace])
        inside.append(found.batch_size.low <= truth[1] / truth[0] <= found.batch_size.high)
    errors = np.std(estimates, axis=0) / math.sqrt(200)
    assert np.all(np.abs(np.mean(estimates, axis=0) - truth) < 3.5 * errors)
    assert np.all(errors < 0.05 * truth)  # the check can tell
    assert 0.84 <= np.mean(inside) <= 0.97


def test_samples_of_a_regression_have_the_scale_that_all_of_them_show():
    random = np.random.default_rng(1)
    X, noise = random.standard_normal((2000, 10)), random.standard_normal(2000)
    w = np.full(10, 0.3)
    per_sample = (X @ w + noise)[:, None] * X  # of squared error over 2, away from the optimum by w
    G = per_sample.mean(axis=0)
    truth = per_sample.var(axis=0).sum() / (G @ G)
    chosen = per_sample[random.integers(0, 2000, (300, 4, 16))].mean(axis=2)
    found = noise_scale(*np.array([squared_norms(one) for one in chosen]).T, small_batch=16, big_batch=64)
    assert found.batch_size.low <= truth <= found.batch_size.high
    assert found.batch_size.high < 1.6 * found.batch_size.low


def test_a_gradient_that_noise_hides_has_no_upper_end():
    random = np.random.default_rng(2)
    ends = [
        noise_scale(*drawn(random, 8, 2, 4, np.zeros(5), np.ones(5)), small_batch=4, big_batch=8).batch_size
        for _ in range(40)
    ]
    assert sum(one.high == math.inf for one in ends) >= 34  # of 40: nine in ten
    assert all(one.low <= one.value for one in ends)
    no_noise = noise_scale([2.0, 2.0], [2.0, 2.0], small_batch=4, big_batch=8)
    assert no_noise.batch_size.value == 0
    assert no_noise.examples_factor(8) == math.inf


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1.0], [1.0], 4, 8), "two steps or more"),
        (([1.0, 1.0], [1.0], 4, 8), "both squared norms"),
        (([1.0, 1.0], [1.0, 1.0], 4, 4), "with one worker there is only one"),
        (([1.0, 1.0], [1.0, 1.0], 8, 4), "the small one first, not 8 and 4"),
    ],
)
def test_refused_in_one_sentence(arguments, says):
    small, big, small_batch, big_batch = arguments
    with pytest.raises(UsageError, match=says):
        noise_scale(small, big, small_batch=small_batch, big_batch=big_batch)
