"""Ernest on planted data: the coefficients are known."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.system_model import SystemModel, system_features


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_coefficients_are_never_negative_however_the_times_look(seed):
    random = np.random.default_rng(seed)
    model = SystemModel.fit(random.integers(1, 9, 12), random.uniform(0.1, 1.0, 12), random.uniform(0.1, 1.0, 12))
    assert np.all(model.theta >= 0)
    assert all(model.predict(m).value >= 0 for m in (1, 10, 1000))


@pytest.mark.parametrize("relative", [False, True])
def test_nine_in_ten_new_measurements_lie_within_the_interval(relative):
    random = np.random.default_rng(0)
    inside = []
    workers, sizes = zip(*itertools.product(range(1, 9), (0.25, 1.0)), strict=True)
    for _ in range(150):
        theta = random.uniform(0.1, 1, 4) * (random.random(4) < 0.6) + [0, 0.5, 0, 0]

        def measured(m, s, theta=theta):
            clean = system_features(m, s) @ theta
            return clean + 0.05 * random.standard_normal(len(clean)) * (clean if relative else 1.0)

        model = SystemModel.fit(workers, np.maximum(measured(workers, sizes), 1e-3), sizes, relative=relative)
        for m in (1, 5, 8, 16):
            found = model.predict(m)
            inside.append(found.low <= measured([m], [1.0])[0] <= found.high)
    assert 0.86 <= np.mean(inside) <= 0.97


def test_what_was_not_measured_has_no_upper_end():
    assert SystemModel.fit([1, 2, 4, 8], [8, 4, 2, 1]).predict(4).high == np.inf  # as many coefficients as times
    two = SystemModel.fit([1, 1, 1, 2, 2, 2], [2.0, 2.1, 1.9, 1.2, 1.1, 1.0])
    assert two.predict(2).high < 1.6
    assert two.predict(3).high == np.inf  # no combination of 1 and 2: both log m and m fit
    smaller = SystemModel.fit([1, 1, 2, 2, 4, 4], [1.0, 1.1, 0.6, 0.5, 0.3, 0.3], [0.5] * 6).predict(4)
    assert smaller.extrapolated  # their size was 0.5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: SystemModel.fit([], []), "at least one"),
        (lambda: SystemModel.fit([1, 2], [1.0]), "one time and one size for each"),
        (lambda: SystemModel.fit([0], [1.0]), "must be 1 or more"),
        (lambda: SystemModel.fit([1], [0.0]), "above 0"),
        (lambda: SystemModel.fit([1], [np.nan]), "above 0"),
    ],
)
def test_refused_in_one_sentence(call, says):
    with pytest.raises(UsageError, match=says):
        call()
