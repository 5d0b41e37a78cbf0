"""One thread equals plain SGD step by step, in double precision, for every loss, penalty and step size."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

from paceline.sparse import losses
from paceline.sparse.linear import LinearModel, Loss
from paceline.sparse.losses import CODES
from paceline.sparse.rows import rows_of
from paceline.sparse.steps import CONSTANT, INVSCALING, OPTIMAL, PassPlan
from paceline.sparse.team import Team
from sparse_problems.reference import VALUES, Account, sgd, slope

PROBLEM = {
    "loss": st.sampled_from(sorted(CODES)),
    "penalty": st.sampled_from([(0.0, 0.0), (0.0, 0.03), (0.02, 0.0), (0.01, 0.04), (0.0, 30.0), (0.5, 3.0)]),
    "schedule": st.sampled_from([CONSTANT, INVSCALING, OPTIMAL]),
    "adagrad": st.booleans(),
    "classes": st.sampled_from([1, 1, 2, 3, 5]),
    "dense": st.booleans(),
    "weighted": st.booleans(),
    "chunk": st.sampled_from([1, 2, 3, 5, 8]),
    "seed": st.integers(0, 10_000),
}


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(**PROBLEM)
def test_one_thread_equals_numpy(loss, penalty, schedule, adagrad, classes, dense, weighted, chunk, seed):
    rng = np.random.default_rng(seed)
    count, width = int(rng.integers(1, 30)), int(rng.integers(1, 12))
    X = rng.standard_normal((count, width)) * (rng.random((count, width)) < 0.5)
    plan = PassPlan(CODES[loss], 0.3, schedule, 0.2, 0.4, 3.0, *penalty, adagrad, True, 0.7, chunk)
    targets = rng.integers(0, classes, count).astype(float) if classes > 1 else rng.choice([-1.0, 1.0], count)
    weights = rng.random(count) * 2 if weighted else np.ones(count)
    balance = rng.random((classes, 2)) + 0.5
    passes = 2

    model = LinearModel(width, classes, np.dtype("f8"))
    with Team(1) as team:
        rows = rows_of(X if dense else sparse.csr_matrix(X))
        learning = model.learn(
            rows, targets, plan, team, weights=weights if weighted else None, balance=balance, seed=None
        )
        for _ in range(passes):
            learning.make_pass()
        learning.settle()

    for number in range(classes):
        y = np.where(targets == number, 1.0, -1.0) if classes > 1 else targets
        share = weights * balance[number, (y > 0).astype(int)]
        w, b, squares, account = np.zeros(width), 0.0, np.full(width, 1e-10), Account(width)
        for done in range(passes):
            w, b, squares = sgd(
                X, y, share, plan, lambda p, t: losses.slope_of.py_func(CODES[loss], p, t, 0.3),
                range(count), w=w, b=b, squares=squares, first_step=done * count, account=account,
            )  # fmt: skip
        np.testing.assert_allclose(model.coordinates[:, number], w, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(model.intercepts[number], b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss", sorted(CODES))
def test_slopes_are_the_derivatives_of_the_losses_and_these_the_textbook_s(loss):
    rng = np.random.default_rng(3)
    for p, y in zip(rng.normal(0, 3, 200), rng.choice([-1.0, 1.0], 200), strict=True):
        assert losses.value_of.py_func(CODES[loss], p, y, 0.3) == pytest.approx(VALUES[loss](p, y, 0.3), abs=1e-12)
        assert losses.slope_of.py_func(CODES[loss], p, y, 0.3) == pytest.approx(slope(loss, p, y, 0.3), abs=1e-5)


def test_the_mean_loss_of_a_pass_is_what_was_met_on_the_way():
    X, y = np.eye(3), np.array([1.0, -1.0, 1.0])
    model = LinearModel(3, 1, np.dtype("f8"))
    plan = PassPlan(CODES["hinge"], 0.1, CONSTANT, 0.5, 0.5, 1.0, 0.0, 0.0, False, True, 0.0, 1)
    with Team(1) as team:
        learning = model.learn(rows_of(X), y, plan, team)
        assert [learning.make_pass().loss for _ in range(3)] == [1.0, 0.5, 0.0]


def test_a_loss_of_one_s_own_is_compiled_into_the_same_loop():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 5)), rng.standard_normal(40)
    own = Loss(value=lambda p, y: (p - y) ** 4 / 4, slope=lambda p, y: (p - y) ** 3)
    model = LinearModel(5, 1, np.dtype("f8"))
    plan = PassPlan(losses.code_of(own, ()), 0.1, CONSTANT, 0.01, 0.5, 1.0, 0.0, 0.1, False, True, 1.0, 8)
    with Team(1) as team:
        learning = model.learn(rows_of(X), y, plan, team, loss=own, seed=None)
        learning.make_pass()
        learning.settle()
    w, b, _ = sgd(
        X, y, np.ones(40), plan, own.slope, range(40), w=np.zeros(5), b=0.0, squares=np.zeros(5), account=Account(5)
    )
    np.testing.assert_allclose(model.coordinates[:, 0], w, rtol=1e-10)
    assert model.intercepts[0] == pytest.approx(b)
