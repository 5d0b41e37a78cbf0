"""The disciplines that Hogwild! is compared with: plain SGD on one thread, and what each promises on several."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from paceline.sparse import losses
from paceline.sparse.linear import DISCIPLINES, LinearModel
from paceline.sparse.losses import CODES
from paceline.sparse.rows import rows_of
from paceline.sparse.steps import CONSTANT, OPTIMAL, PassPlan
from paceline.sparse.team import Team
from sparse_problems.reference import Account, sgd
from sparse_problems.test_threads import text_like

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "fidelity"))
from disciplines import OTHER, ComparedLearning, _exchange, _push, resources_for

sys.path.pop()  # it has modules that are called like other benchmarks


def learn(model, rows, targets, plan, team, *, discipline, **how):
    begin = model.learn if discipline in DISCIPLINES else lambda *of, **named: ComparedLearning(model, *of, **named)
    return begin(rows, targets, plan, team, discipline=discipline, **how)


@pytest.fixture(scope="module")
def data():
    X, y = text_like()
    X.sort_indices()
    return X, y


def plan_of(loss, schedule=CONSTANT, *, eta=1.0, l2=0.0, epsilon=0.1):
    return PassPlan(CODES[loss], epsilon, schedule, eta, 0.5, 3.0, 0.0, l2, False, True, 0.7, 5)


@pytest.mark.parametrize("discipline", [*DISCIPLINES, *OTHER])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    ("loss", "schedule", "l2"), [("log_loss", CONSTANT, 0.0), ("hinge", OPTIMAL, 0.03), ("huber", CONSTANT, 30.0)]
)
def test_one_thread_equals_numpy(discipline, dense, loss, schedule, l2):
    rng = np.random.default_rng(1)
    X = rng.standard_normal((60, 9)) * (rng.random((60, 9)) < 0.5)
    y, weights, balance = rng.choice([-1.0, 1.0], 60), rng.random(60), np.array([[0.5, 1.5]])
    plan = plan_of(loss, schedule, eta=0.2, l2=l2, epsilon=0.3)
    model = LinearModel(9, 1, np.dtype("f8"))
    with Team(1) as team:
        rows = rows_of(X if dense else sparse.csr_matrix(X))
        learning = learn(model, rows, y, plan, team, weights=weights, balance=balance, seed=None, discipline=discipline)
        for _ in range(2):
            learning.make_pass()
        learning.settle()
    w, b, account = np.zeros(9), 0.0, Account(9)
    share = weights * balance[0, (y > 0).astype(int)]
    for done in range(2):
        w, b, _ = sgd(
            X, y, share, plan, lambda p, t: losses.slope_of.py_func(CODES[loss], p, t, 0.3),
            range(60), w=w, b=b, squares=np.zeros(9), first_step=60 * done, account=account,
        )  # fmt: skip
    np.testing.assert_allclose(model.coordinates[:, 0], w, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(model.intercepts[0], b, rtol=1e-9, atol=1e-11)


def rise(X, discipline, threads, passes=2):
    """Targets out of reach: every slope is -1, and each pass adds the sum of the rows."""
    model = LinearModel(X.shape[1], 1, np.dtype("f8"))
    with Team(threads) as team:
        learning = learn(
            model,
            rows_of(X),
            np.full(X.shape[0], 1e9),
            plan_of("epsilon_insensitive"),
            team,
            seed=3,
            discipline=discipline,
        )
        for _ in range(passes):
            learning.make_pass()
    return model


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("discipline", ["atomic", "locks"])
def test_no_update_is_lost(discipline, threads):
    """Where every update meets every other; ordinary additions lose thousands."""
    rows, passes = 200_000, 10
    model = rise(np.ones((rows, 2)), discipline, threads, passes)
    assert (model.coordinates == passes * rows).all()
    assert model.intercepts[0] == pytest.approx(passes * 0.7 * rows, rel=1e-9)


def test_updates_in_turn_have_the_bits_of_one_thread(data):
    X, _ = data
    alone, *others = (rise(X, "round-robin", threads).coordinates.tobytes() for threads in (1, 2, 3))
    assert others == [alone, alone]


def loss(X, y, discipline="shared", threads=1):
    model, targets = LinearModel(X.shape[1], 1, X.dtype), np.where(y > 0, 1.0, -1.0)
    plan, eta = plan_of("log_loss", l2=1e-5), 1.0
    with Team(threads) as team:
        learning = learn(model, rows_of(X), targets, plan, team, discipline=discipline, seed=1)
        for _ in range(8):
            learning.make_pass(eta=eta)
            eta *= 0.6
        learning.settle()
    return np.logaddexp(0, -targets * (X @ model.coordinates[:, 0] + model.intercepts[0])).mean()


@pytest.mark.parametrize("discipline", ["atomic", "locks", "round-robin"])
@pytest.mark.parametrize("threads", [2, 3])
def test_the_loss_is_one_thread_s(data, discipline, threads):
    assert loss(*data, discipline, threads) == pytest.approx(loss(*data), rel=0.02)


@pytest.mark.parametrize("threads", [2, 3])
def test_replicas_learn_and_no_better_than_one_thread(data, threads):
    """What averaging costs follows from how evenly the threads run: one that has all the rows averages with nobody."""
    alone = loss(*data)
    assert 0.98 * alone < loss(*data, "replicas", threads) < 0.6 * np.log(2)


def test_an_exchange_of_replicas_is_the_paper_s():
    rng = np.random.default_rng(0)
    resources = resources_for("replicas", 3, np.zeros(6))[2]
    resources.replicas[:] = rng.normal(0, 1, (3, 7))
    resources.snapshots[2] = resources.replicas[2] - np.array([0.5, 1e-3, -0.2, 0, -1e-3, 2, -2])
    w, base, following = resources.replicas[2].copy(), resources.snapshots[2].copy(), resources.replicas[0].copy()
    _exchange(resources)
    beta, keep = resources.push, resources.keep
    assert keep == pytest.approx(1 - beta**2)
    for j, change in enumerate(w - base):
        mixed = keep * following[j] + (1 - keep) * w[j]
        if abs(change) > 0.01:
            expected = (mixed + (beta + keep - 1) * change,) * 2 + (following[j] + beta * change,)
        else:  # kept for later
            expected = (mixed, mixed - change, following[j])
        found = (resources.replicas[2, j], resources.snapshots[2, j], resources.replicas[0, j])
        assert found == pytest.approx(expected)


def test_a_change_that_has_been_round_the_ring_counts_once():
    for threads in (2, 3, 5, 8):
        assert _push(threads) ** threads + _push(threads) == pytest.approx(1)
