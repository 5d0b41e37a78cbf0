"""The estimators in use: text, pipelines, grid search, weights, stopping, what is saved, and what is refused."""

import csv
import gzip
import pickle
import tracemalloc
import warnings

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import real_data
from paceline.errors import UsageError
from paceline.sklearn import HogwildClassifier, HogwildRegressor
from real_data import needs_ag_news


@pytest.fixture(scope="module")
def two_classes():
    X, y = make_classification(400, 20, n_informative=8, random_state=0)
    return StandardScaler().fit_transform(X), y


@needs_ag_news
def test_ag_news_within_0_3_points_of_scikit_learn():
    texts = []
    for part in ("train", "test"):
        with gzip.open(real_data.FOLDER / "ag_news" / f"{part}.csv.gz", "rt", newline="") as lines:
            texts.append(list(zip(*((row["content"], row["label"]) for row in csv.DictReader(lines)), strict=True)))
    (words, labels), (new_words, new_labels) = texts
    ours = make_pipeline(TfidfVectorizer(sublinear_tf=True), HogwildClassifier(n_jobs=2, random_state=0))
    ours.fit(words, labels)
    assert ours[-1].n_threads_ == 2
    X, X_new = ours[0].transform(words), ours[0].transform(new_words)
    theirs = np.mean([SGDClassifier(random_state=seed).fit(X, labels).score(X_new, new_labels) for seed in range(2)])
    assert ours.score(new_words, new_labels) > theirs - 0.003


def test_in_a_grid_search_and_saved(two_classes):
    X, y = two_classes
    search = GridSearchCV(HogwildClassifier("log_loss", random_state=0), {"alpha": [1e-4, 1e-2]}, cv=3).fit(X, y)
    assert search.best_score_ > 0.8
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert np.array_equal(again.predict_proba(X), search.predict_proba(X))
    assert again.partial_fit(X, y).score(X, y) > 0.8


def test_dense_and_sparse_input_agree_but_for_the_intercept_s_rate(two_classes):
    X, y = two_classes
    options = {"random_state": 0, "fit_intercept": False, "max_iter": 5, "tol": None}
    dense, packed = (HogwildClassifier(**options).fit(data, y) for data in (X, sparse.csr_matrix(X)))
    np.testing.assert_allclose(dense.coef_, packed.coef_, rtol=1e-9)
    wide = sparse.csr_matrix(X)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    np.testing.assert_allclose(HogwildClassifier(**options).fit(wide, y).coef_, packed.coef_)


def test_class_and_sample_weights_say_the_same(two_classes):
    X, y = two_classes
    options = {"random_state": 0, "max_iter": 3, "tol": None}
    by_class = HogwildClassifier(class_weight={0: 3.0, 1: 0.5}, **options).fit(X, y)
    by_sample = HogwildClassifier(**options).fit(X, y, sample_weight=np.where(y == 0, 3.0, 0.5))
    np.testing.assert_allclose(by_class.coef_, by_sample.coef_, rtol=1e-9)


def test_passes_of_partial_fit_are_those_of_fit(two_classes):
    X, y = two_classes
    whole = HogwildClassifier(shuffle=False, max_iter=3, tol=None).fit(X, y)
    parts = HogwildClassifier(shuffle=False)
    for _ in range(3):
        parts.partial_fit(X, y, classes=[0, 1])
    np.testing.assert_allclose(parts.coef_, whole.coef_, rtol=1e-9)
    assert parts.t_ == whole.t_ == 3 * len(y) + 1


def test_warm_start_goes_on(two_classes):
    X, y = two_classes
    model = HogwildClassifier("log_loss", alpha=0.01, warm_start=True, max_iter=200, random_state=0).fit(X, y)
    first = model.passes_[0].loss
    assert model.fit(X, y).passes_[0].loss < first


@pytest.mark.parametrize("penalty", ["l1", "elasticnet"])
def test_l1_makes_zeros(two_classes, penalty):
    X, y = two_classes
    model = HogwildClassifier(penalty=penalty, l1_ratio=0.9, alpha=0.05, random_state=0).fit(X, y)
    assert 0 < np.count_nonzero(model.coef_) < 15
    assert model.sparsify().score(X, y) > 0.7


@pytest.mark.parametrize("learning_rate", ["constant", "optimal", "invscaling", "adaptive", "decay", "adagrad"])
def test_every_learning_rate_learns_several_classes(learning_rate):
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    options = {"learning_rate": learning_rate, "eta0": 0.3, "max_iter": 100, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = HogwildClassifier("log_loss", **options).fit(X, y)
    assert model.score(X, y) > 0.83
    assert model.predict_proba(X).sum(axis=1) == pytest.approx(1)
    assert model.coef_.shape == (3, 4)


@pytest.mark.parametrize("kind", [HogwildClassifier, HogwildRegressor])
def test_early_stopping_that_cannot_be_is_one_sentence(kind, two_classes):
    X, y = two_classes
    more = {"classes": np.unique(y)} if kind is HogwildClassifier else {}
    with pytest.raises(UsageError, match="early_stopping should be False with partial_fit"):
        kind(early_stopping=True).partial_fit(X, y, **more)
    with pytest.raises(UsageError, match="holds out have weight 0"):
        kind(early_stopping=True, random_state=0).fit(X, y, sample_weight=np.arange(len(y)) == 0)


def test_early_stopping_holds_out_a_part(two_classes):
    X, y = two_classes
    model = HogwildClassifier(early_stopping=True, n_iter_no_change=3, random_state=0).fit(X, y)
    assert model.n_iter_ < 100
    assert model.passes_[0].examples == 360


def test_regression():
    random = np.random.default_rng(0)
    X = random.standard_normal((500, 6))
    y = X @ np.arange(6.0) + 2
    for loss in ("squared_error", "huber", "epsilon_insensitive"):
        model = HogwildRegressor(loss, random_state=0, eta0=0.05, max_iter=300, alpha=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            assert model.fit(X, y).score(X, y) > 0.98
        assert model.coef_.shape == (6,)


def test_divergence_is_said(two_classes):
    X, y = two_classes
    with pytest.warns(ConvergenceWarning, match="diverged"):
        HogwildRegressor(eta0=100.0, max_iter=20, random_state=0).fit(X, y.astype(float))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "nonsense"}, "Unknown loss 'nonsense'"),
        ({"penalty": "l3"}, "penalty must be one of"),
        ({"alpha": -1}, "alpha must be 0 or more"),
        ({"alpha": 0}, "alpha must be above 0 for learning_rate='optimal'"),
        ({"l1_ratio": 2}, "l1_ratio must be from 0 to 1"),
        ({"learning_rate": "constant", "eta0": 0}, "eta0 must be above 0"),
        ({"n_jobs": 0}, "n_jobs must be 1 or more"),
        ({"n_jobs": -2}, "n_jobs must be 1 or more"),
        ({"max_iter": 0}, "max_iter must be a whole number"),
        ({"decay": 0}, "decay must be above 0"),
        ({"validation_fraction": 1}, "validation_fraction must be between 0 and 1"),
    ],
)
def test_wrong_parameters_are_named(two_classes, options, words):
    with pytest.raises(UsageError, match=words):
        HogwildClassifier(**options).fit(*two_classes)


def test_wrong_data_is_named(two_classes):
    X, y = two_classes
    with pytest.raises(UsageError, match="one class only"):
        HogwildClassifier().fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="X contains NaN"):
        HogwildClassifier().fit(np.where(X > 1, np.nan, X), y)
    with pytest.raises(ValueError, match=r"sample_weight.*NaN"):
        HogwildClassifier().fit(X, y, sample_weight=np.full(len(y), np.nan))
    with pytest.raises(UsageError, match="labels that are not in classes"):
        HogwildClassifier().partial_fit(X, y, classes=[1, 2])
    with pytest.raises(ValueError, match="20 features"):
        HogwildClassifier().fit(X, y).predict(X[:, :3])


def test_empty_rows_are_harmless():
    X = sparse.csr_matrix(([1.0, -1.0], [0, 0], [0, 1, 1, 2, 2]), shape=(4, 3))
    assert np.isfinite(HogwildClassifier(random_state=0).fit(X, [1, 0, 0, 1]).coef_).all()


def test_a_fit_takes_little_more_than_a_copy_of_the_weights_per_thread_and_16_bytes_per_example():
    rows, features, threads, length = 100_000, 40_000, 2, 10
    indices = np.random.default_rng(0).integers(0, features // length, (rows, length)) + np.arange(length) * (
        features // length
    )
    X = sparse.csr_matrix(
        (
            np.ones(indices.size, np.float32),
            indices.astype(np.int32).ravel(),
            np.arange(rows + 1, dtype=np.int32) * length,
        )
    )
    y = (np.arange(rows) % 2).astype(np.float32)
    fit = HogwildClassifier("log_loss", max_iter=1, tol=None, n_jobs=threads).fit(X, y)  # compiles
    tracemalloc.start()
    fit.fit(X, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fit.n_threads_ == threads
    assert peak < 1.1 * threads * 4 * features + 16 * rows
