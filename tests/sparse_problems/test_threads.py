"""Several threads: the same bits when asked for, nearly the same result when racing, and nothing lost at merges."""

import numpy as np
import pytest
from scipy import sparse

from paceline.sklearn import HogwildClassifier
from paceline.sparse.hot import VISITS, tiers_for
from paceline.sparse.linear import LinearModel
from paceline.sparse.losses import Loss
from paceline.sparse.rows import frequencies, rows_of
from paceline.sparse.steps import CONSTANT, PassPlan
from paceline.sparse.team import Team, count_threads

FALLING = Loss(value=lambda p, y: p, slope=lambda p, y: 1.0)  # one object: compiled once


def text_like(rows=6000, features=2000, length=40, seed=0):
    """Normalised rows with a few words in most of them."""
    rng = np.random.default_rng(seed)
    chance = 1 / np.arange(5, features + 5)
    indices = np.searchsorted(np.cumsum(chance / chance.sum()), rng.random(rows * length)).clip(max=features - 1)
    matrix = sparse.csr_matrix(
        (np.ones(rows * length), (np.repeat(np.arange(rows), length), indices)), (rows, features)
    )
    matrix.data = 1 + np.log(matrix.data)
    matrix = sparse.diags(1 / np.sqrt(matrix.multiply(matrix).sum(1).A1)).dot(matrix).tocsr()
    labels = np.sign(matrix @ rng.standard_normal(features) + 0.02 * rng.standard_normal(rows))
    return matrix, labels


@pytest.fixture(scope="module")
def data():
    return text_like()


@pytest.mark.parametrize("learning_rate", ["optimal", "decay", "adagrad"])
def test_deterministic_fits_have_the_same_bits_for_any_number_of_threads(data, learning_rate):
    X, y = data
    options = {"learning_rate": learning_rate, "max_iter": 3, "tol": None, "random_state": 7, "eta0": 0.5}
    fits = [HogwildClassifier(n_jobs=n, deterministic=True, **options).fit(X, y) for n in (1, 1, 2, 3)]
    lone = HogwildClassifier(n_jobs=1, **options).fit(X, y)
    for fit in (*fits[1:], lone):
        assert fit.coef_.tobytes() == fits[0].coef_.tobytes()
        assert fit.intercept_.tobytes() == fits[0].intercept_.tobytes()
    other = HogwildClassifier(n_jobs=1, **(options | {"random_state": 8})).fit(X, y)
    assert other.coef_.tobytes() != fits[0].coef_.tobytes()


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("penalty", ["l2", "l1"])
def test_racing_fits_stay_within_two_percent_of_the_deterministic_loss(data, threads, penalty):
    X, y = data

    def loss(**how):
        fit = HogwildClassifier(
            "log_loss",
            penalty=penalty,
            alpha=1e-5,
            learning_rate="decay",
            eta0=1.0,
            decay=0.6,  # larger last steps leave the last examples' noise, which alone is 3 %
            max_iter=8,
            tol=None,
            random_state=1,
            **how,
        ).fit(X, y)
        assert fit.n_threads_ == (1 if "deterministic" in how else min(threads, X.nnz // 50_000))
        return np.logaddexp(0, -y * fit.decision_function(X)).mean()

    alone = loss(deterministic=True)
    assert loss(n_jobs=threads) == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("classes", [1, 3])
def test_what_threads_change_in_their_copies_arrives_in_the_model(data, threads, classes):
    """With a slope of 1 everywhere, the end is known: minus the sum of the rows."""
    X, _ = data
    model = LinearModel(X.shape[1], classes, np.dtype("f8"))
    plan = PassPlan(9, 0.1, CONSTANT, 1.0, 0.5, 1.0, 0.0, 0.0, False, False, 1.0, 256)
    with Team(threads) as team:
        learning = model.learn(rows_of(X), np.zeros(X.shape[0]), plan, team, loss=FALLING, seed=3)
        for _ in range(2):
            learning.make_pass()
    expected = -2 * np.asarray(X.sum(axis=0)).ravel()
    assert (learning.tiers is not None) == (threads > 1)
    lost = np.abs(model.coordinates - expected[:, None]).sum() / np.abs(expected).sum() / classes
    assert lost < 1e-12
    assert model.intercepts == pytest.approx(-2 * X.shape[0], rel=1e-12)


def test_every_example_is_visited_once_a_pass():
    rows = 5000
    X = sparse.identity(rows, format="csr")
    plan = PassPlan(9, 0.1, CONSTANT, 1.0, 0.5, 1.0, 0.0, 0.0, False, False, 0.0, 256)
    model = LinearModel(rows, 1, np.dtype("f8"))
    with Team(3) as team:
        learning = model.learn(rows_of(X), np.zeros(rows), plan, team, loss=FALLING, discipline="shared")
        learning.make_pass()
        assert (model.coordinates == -1).all()
        learning.make_pass()
        assert (model.coordinates == -2).all()


def test_hot_coordinates_come_first_and_are_merged_after_about_as_many_updates_each(data):
    X, _ = data
    often = frequencies(rows_of(X), X.shape[1])
    tiers = tiers_for(often, examples=100_000, threads=2)
    visits = VISITS // 2
    assert list(often[tiers.hot]) == sorted(often[tiers.hot], reverse=True)
    for end, period in zip(tiers.ends, tiers.periods, strict=True):
        assert (often[tiers.hot[:end]] >= 0.5 * visits / period).all()
        assert np.count_nonzero(often >= 0.5 * visits / period) == end
    assert tiers.sweep > max(tiers.periods)


def test_small_problems_use_one_thread():
    assert count_threads(8, 40_000) == 1
    assert count_threads(2, 10_000_000) == 2
