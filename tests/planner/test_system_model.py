"""Ernest on planted data: the coefficients are known, so are the best experiments' variances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.experiment_design import ShortRun, candidates, design, prediction_variance
from paceline.planner.system_model import SystemModel, system_features

coefficients = st.floats(0.05, 5.0) | st.just(0.0)
thetas = st.tuples(coefficients, st.floats(0.05, 5.0), coefficients, coefficients)
GRID = candidates(16, np.linspace(0.05, 1.0, 20).tolist())


def columns(trials):
    return [one.workers for one in trials], [one.size for one in trials]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(thetas, st.integers(4, 12), st.booleans())
def test_planted_coefficients_are_recovered_from_the_designed_trials(theta, max_workers, relative):
    workers, sizes = columns(design(candidates(max_workers), 12.0).trials)
    times_s = system_features(workers, sizes) @ theta
    model = SystemModel.fit(workers, times_s, sizes, relative=relative)
    assert np.allclose(model.theta, theta, atol=1e-6 * max(theta))
    further = model.predict(5 * max_workers)
    assert further.value == pytest.approx(system_features([5 * max_workers], [1.0])[0] @ theta, rel=1e-5)
    assert further.extrapolation == f"workers {5 * max_workers} is more than the {max(workers)} that were measured"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_coefficients_are_never_negative_however_the_times_look(seed):
    random = np.random.default_rng(seed)
    model = SystemModel.fit(random.integers(1, 9, 12), random.uniform(0.1, 1.0, 12), random.uniform(0.1, 1.0, 12))
    assert np.all(model.theta >= 0)
    assert np.all(model.times([1, 10, 1000]) >= 0)


@pytest.mark.parametrize("relative", [False, True])
def test_nine_in_ten_new_measurements_lie_within_the_interval(relative):
    random = np.random.default_rng(0)
    inside = []
    workers, sizes = columns(candidates(8, (0.25, 1.0)))
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
    assert "size 1 is more than the 0.5 that were measured" in smaller.extrapolation


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.floats(8.0, 40.0))
def test_the_design_beats_random_trials_of_equal_cost(seed, budget):
    targets = [ShortRun(workers=m, size=1.0) for m in (1, 2, 4, 8, 16)]
    chosen = design(GRID, budget, targets=targets)
    assert chosen.cost <= budget + 1e-9
    assert chosen.bound <= chosen.criterion
    variance = prediction_variance(chosen.trials, targets).sum()
    assert variance == pytest.approx(chosen.criterion, rel=1e-6)
    random = np.random.default_rng(seed)
    others = [prediction_variance(any_trials(random, budget), targets).sum() for _ in range(25)]
    assert variance < min(others)
    assert variance < 0.5 * np.median(others)


def any_trials(random, budget):
    """In random order, each that can still be paid for."""
    trials = []
    for j in random.permutation(len(GRID)):
        if (cost := GRID[j].size / 0.05 / GRID[j].workers) <= budget:
            trials.append(GRID[j])
            budget -= cost
    return trials


def test_a_designed_variance_is_the_one_that_fits_have():
    random, targets = np.random.default_rng(1), [ShortRun(workers=16, size=1.0)]
    chosen = design(GRID, 20.0, targets=targets)
    workers, sizes = columns(chosen.trials)
    A = system_features(workers, sizes)
    row = system_features([16], [1.0])[0]
    errors = [row @ np.linalg.lstsq(A, random.standard_normal(len(A)), rcond=None)[0] for _ in range(2000)]
    assert np.var(errors) == pytest.approx(chosen.criterion, rel=0.12)


def test_a_optimality_as_in_the_paper_is_as_good_as_a_general_optimiser_finds():
    from scipy.optimize import minimize

    grid = candidates(6, (0.1, 0.5, 1.0))
    workers, sizes = columns(grid)
    A = system_features(workers, sizes)
    A = A / A.mean(axis=0)
    costs = np.array(sizes) / 0.1 / np.array(workers)

    def trace(weights):
        return np.trace(np.linalg.inv((A * weights[:, None]).T @ A))

    found = minimize(
        trace,
        np.full(len(grid), 10 / costs.sum()),
        method="SLSQP",
        bounds=[(0, 1)] * len(grid),
        constraints={"type": "ineq", "fun": lambda weights: 10 - costs @ weights},
        options={"maxiter": 300},
    )
    ours = design(grid, 10.0, a_optimal=True)
    assert trace(ours.weights) <= 1.002 * found.fun
    assert ours.bound <= found.fun
    assert costs @ ours.weights <= 10 + 1e-9
    assert ours.criterion >= found.fun * 0.998  # whole trials are a restriction


@pytest.mark.parametrize("max_workers", [1, 2, 3])
def test_few_workers_are_designed_for_too(max_workers):
    chosen = design(candidates(max_workers), 9.0)
    targets = [ShortRun(workers=m, size=1.0) for m in range(1, max_workers + 1)]
    assert np.all(prediction_variance(chosen.trials, targets) < 10)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: SystemModel.fit([], []), "at least one"),
        (lambda: SystemModel.fit([1, 2], [1.0]), "one time and one size for each"),
        (lambda: SystemModel.fit([0], [1.0]), "must be 1 or more"),
        (lambda: SystemModel.fit([1], [0.0]), "above 0"),
        (lambda: SystemModel.fit([1], [np.nan]), "above 0"),
        (lambda: design([], 1.0), "no trials to choose from"),
        (lambda: design(candidates(8), 0.2), "pays for no trials that tell 4 coefficients apart"),
        (lambda: design(candidates(2), 9.0, targets=[ShortRun(workers=8, size=1.0)]), "no combination of the trials"),
        (lambda: design(candidates(2), 9.0, costs=[1.0]), "one cost above 0"),
    ],
)
def test_refused_in_one_sentence(call, says):
    with pytest.raises(UsageError, match=says):
        call()
