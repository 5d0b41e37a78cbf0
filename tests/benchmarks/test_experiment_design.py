"""Ernest's experiment design: chosen trials against random ones, and against a general optimiser."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.system_model import SystemModel, system_features

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "fidelity"))
from experiment_design import ShortRun, candidates, design, prediction_variance

sys.path.pop()  # it has modules that are called like other benchmarks

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
    assert further.extrapolated


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
        (lambda: design([], 1.0), "no trials to choose from"),
        (lambda: design(candidates(8), 0.2), "pays for no trials that tell 4 coefficients apart"),
        (lambda: design(candidates(2), 9.0, targets=[ShortRun(workers=8, size=1.0)]), "no combination of the trials"),
        (lambda: design(candidates(2), 9.0, costs=[1.0]), "one cost above 0"),
    ],
)
def test_refused_in_one_sentence(call, says):
    with pytest.raises(UsageError, match=says):
        call()
