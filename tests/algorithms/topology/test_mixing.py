"""Closed forms appear here only: the code computes eigenvalues, and runs the averaging."""

from math import ceil, cos, log2, pi

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.topology.mixing_analysis import (
    check_doubly_stochastic,
    expected_contraction,
    measure_contraction,
    mixing_matrix,
    pair_matrix,
    pair_probabilities,
    period_matrix,
    run_pairwise_averaging,
    spectral_gap,
)
from paceline.algorithms.topology import (
    BipartiteExponential,
    BipartiteRing,
    Complete,
    Custom,
    Exponential,
    OnePeerExponential,
    Ring,
    Star,
    Torus,
    metropolis_weights,
)
from paceline.errors import UsageError

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
SHAPES = [
    Ring(),
    BipartiteRing(),
    Complete(),
    Star(),
    Torus(),
    Exponential(),
    OnePeerExponential(),
    BipartiteExponential(),
]


def exists(shape, n):
    try:
        shape.check(n)
    except UsageError:
        return False
    return True


possible = pytest.mark.parametrize(
    ("shape", "n"), [(shape, n) for shape in SHAPES for n in SIZES if exists(shape, n)], ids=str
)


@possible
def test_mixing_matrices_are_doubly_stochastic_and_symmetric(shape, n):
    for step in range(shape.period(n)):
        W = mixing_matrix(shape, n, step)
        check_doubly_stochastic(W, tolerance=1e-15 * n)
        assert np.all(np.diag(W) > 0)
        assert np.array_equal(W, W.T) or shape.directed
        assert {(int(i), int(j)) for i, j in np.argwhere(W - np.diag(np.diag(W)))} == {
            (i, j) for i in range(n) for j in shape.neighbours(i, n, step)
        }
        if not isinstance(shape, Star):
            assert np.allclose(W[W > 0], 1 / (1 + len(shape.neighbours(0, n, step))), atol=1e-15)


@possible
def test_everybody_agrees_in_the_end(shape, n):
    assert 0 < spectral_gap(period_matrix(shape, n)) < 1 + 1e-12
    assert 0 < expected_contraction(shape, n) < 1 + 1e-12


#    n   n(1-rho): ring, bipartite exponential, complete   gap: ring, static exponential
TABLE = [
    (4, 1.000, 1.000, 1.333, 0.667, 0.667),
    (8, 0.293, 1.000, 1.143, 0.195, 0.500),
    (16, 0.0761, 1.000, 1.067, 0.0507, 0.400),
    (32, 0.0192, 0.677, 1.032, 0.0128, 0.333),
    (64, 0.0048, 0.604, 1.016, 0.0032, 0.286),
    (128, 0.0012, 0.502, 1.008, 0.0008, 0.250),
]


@pytest.mark.parametrize(("n", "ring", "bipartite", "complete", "ring_gap", "exponential_gap"), TABLE)
def test_the_known_table(n, ring, bipartite, complete, ring_gap, exponential_gap):
    def printed(value):
        return pytest.approx(value, abs=5e-5 if value < 0.1 else 5e-4)

    assert n * expected_contraction(Ring(), n) == printed(ring)
    assert n * expected_contraction(BipartiteExponential(), n) == printed(bipartite)
    assert n * expected_contraction(Complete(), n) == printed(complete)
    assert spectral_gap(mixing_matrix(Ring(), n)) == printed(ring_gap)
    assert spectral_gap(mixing_matrix(Exponential(), n)) == printed(exponential_gap)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 9, 16, 31])
def test_closed_forms(n):
    wave = 1 - cos(2 * pi / n)
    assert expected_contraction(Ring(), n) == pytest.approx(wave / n)
    assert expected_contraction(Complete(), n) == pytest.approx(1 / (n - 1))
    assert expected_contraction(Star(), n) == pytest.approx((1 + 1 / (n - 1)) / (2 * n))
    assert spectral_gap(mixing_matrix(Complete(), n)) == pytest.approx(1)
    assert spectral_gap(mixing_matrix(Star(), n)) == pytest.approx(1 / n)
    assert spectral_gap(mixing_matrix(Ring(), n)) == pytest.approx(
        min(2 * wave / 3, 4 / 3 + 2 / 3 * cos(2 * pi * (n // 2) / n))
    )
    assert spectral_gap(mixing_matrix(Torus(rows=n), n * n)) == pytest.approx(2 * wave / 5)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 12, 16, 20, 64])
def test_static_exponential_gap(n):
    assert spectral_gap(mixing_matrix(Exponential(), n)) == pytest.approx(2 / (1 + ceil(log2(n))))


@pytest.mark.parametrize(("n", "error"), [(2, 0), (4, 0), (8, 0), (16, 0), (12, 1 / 8 - 1 / 12)])
def test_one_peer_exponential_averages_exactly_for_powers_of_two(n, error):
    shape, x = OnePeerExponential(), np.eye(n)
    for step in range(ceil(log2(n))):  # by worker programs' rows, not by matrices
        rows = [metropolis_weights(shape, worker, n, step) for worker in range(n)]
        x = np.stack([sum(weight * x[other] for other, weight in row.items()) for row in rows])
    assert np.abs(x - 1 / n).max() == pytest.approx(error, abs=1e-15)
    assert np.allclose(x, period_matrix(shape, n), atol=1e-15)


@possible
def test_the_expected_pair_average_is_the_one_spelled_out(shape, n):
    if n == 1 or n > 9:
        return
    P = pair_probabilities(shape, n)
    assert P.sum() == pytest.approx(1)
    Ws = [(P[i, j], pair_matrix(n, i, j)) for i in range(n) for j in range(n)]
    expectation = sum(probability * W.T @ W for probability, W in Ws)
    assert expected_contraction(shape, n) == pytest.approx(1 - np.linalg.eigvalsh(expectation)[-2])


@given(st.integers(1, 8), st.data())
def test_pair_averages_are_doubly_stochastic_projections(n, data):
    worker = st.integers(0, n - 1)
    W = pair_matrix(n, data.draw(worker), data.draw(worker))
    check_doubly_stochastic(W)
    assert np.array_equal(W, W.T)
    assert np.allclose(W @ W, W)


@settings(max_examples=30)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 4, 6, 12]), st.integers(0, 60), st.integers(0, 2**32))
def test_running_conserves_the_mean_and_never_spreads(shape, n, num_updates, seed):
    random = np.random.default_rng(seed)
    before = random.normal(size=(3, n))
    kept = before.copy()
    after = run_pairwise_averaging(shape, before, num_updates, random)
    assert np.array_equal(before, kept)
    assert np.allclose(after.mean(axis=1), before.mean(axis=1), atol=1e-12)
    assert np.all(after.var(axis=1) <= before.var(axis=1) + 1e-12)


MEASURED = [
    *((shape, n) for shape in (Ring(), BipartiteExponential(), Complete()) for n in (4, 8, 16, 32, 64, 128)),
    (Ring(), 5),
    (Complete(), 2),
    (Complete(), 3),
    (Star(), 8),
    (Torus(), 12),
    (Exponential(), 12),
    (Custom(links="0-1_1-2_2-3_3-4_1-3"), 5),
]


@pytest.mark.parametrize(("shape", "n"), MEASURED, ids=str)
def test_contraction_as_run_is_the_eigenvalue(shape, n):
    # 4 standard errors: of 25 rows and another seed, one in 600 would fail by chance.
    measured = measure_contraction(shape, n, num_updates=n, num_runs=400, seed=1)
    predicted = (1 - expected_contraction(shape, n)) ** n
    assert abs(measured.remaining - predicted) <= 4 * measured.standard_error + 1e-12
    assert measured.standard_error <= 0.05 * (1 - predicted)  # the band is narrow enough to mean something


def test_the_measurement_tells_graphs_apart():
    as_run = measure_contraction(Ring(), 16, num_updates=16, num_runs=400, seed=1)
    other = (1 - expected_contraction(Torus(), 16)) ** 16
    assert abs(as_run.remaining - other) > 40 * as_run.standard_error


@pytest.mark.parametrize(
    ("shape", "n"), [(Ring(), 8), (Complete(), 9), (Star(), 6), (OnePeerExponential(), 8)], ids=str
)
def test_no_disagreement_outlives_the_bound(shape, n):
    random = np.random.default_rng(1)
    before = random.normal(size=(2_000, n))
    after = run_pairwise_averaging(shape, before, 3 * n, random)
    left = after.var(axis=1) / before.var(axis=1)
    assert left.mean() - 4 * left.std() / 2_000**0.5 <= (1 - expected_contraction(shape, n)) ** (3 * n)


def test_measurements_repeat_with_their_seed():
    def run(seed):
        return measure_contraction(Ring(), 6, num_updates=6, num_runs=20, seed=seed)

    assert run(3) == run(3) != run(4)


@pytest.mark.parametrize(("shape", "n", "runs"), [(Ring(), 1, 9), (Ring(), 4, 1), (OnePeerExponential(), 8, 9)])
def test_what_cannot_be_measured_is_refused(shape, n, runs):
    with pytest.raises(ValueError, match="fixed topology with at least 2 workers, in at least 2 runs"):
        measure_contraction(shape, n, num_updates=4, num_runs=runs, seed=0)


@pytest.mark.parametrize(
    ("W", "says"),
    [
        ([[0.5, 0.5], [0.4, 0.5]], "Row 1 of the mixing matrix sums to 0.9, not 1"),
        ([[0.5, 0.5], [1.0, 0.0]], "Column 0 of the mixing matrix sums to 1.5, not 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "row 0, column 1 is -0.5"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "row 0, column 0 is nan"),
        ([[1.0, 0.0]], "not the shape"),
        ([], "not the shape"),
    ],
)
def test_matrices_that_do_not_average_are_refused(W, says):
    with pytest.raises(ValueError, match=says):
        spectral_gap(np.array(W))


def test_impossible_sizes_have_no_matrix():
    for function in (mixing_matrix, period_matrix, pair_probabilities, expected_contraction):
        with pytest.raises(UsageError, match="even number of workers"):
            function(BipartiteExponential(), 5)
