"""Hemingway on planted laws: the true curves are known for every number of workers, measured or not."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.convergence_model import ConvergenceModel, Curve
from paceline.planner.system_model import SystemModel
from paceline.planner.time_to_loss import TimeToLoss

MEASURED = (1, 2, 4, 8, 16)
OPTIMUM = 0.1
STEPS = np.arange(1.0, 61.0)


def curves(law, workers=MEASURED, noise=0.0, seed=0, iterations=STEPS, optimum=OPTIMUM):
    """Losses of log(P - P*) = law(i, m), each off by a share of the suboptimality."""
    random = np.random.default_rng(seed)
    made = []
    for m in workers:
        off = np.exp(law(iterations, m) + noise * random.standard_normal(len(iterations)))
        made.append(Curve(workers=m, iterations=iterations, losses=optimum + off))
    return made


def cocoa(i, m, *, c0=0.3):
    """Its bound: (1 - c0 / m)^i, which is not linear in the features."""
    return i * np.log1p(-c0 / m)


laws = st.one_of(
    st.builds(lambda c0: lambda i, m: cocoa(i, m, c0=c0), st.floats(0.02, 0.2)),
    st.builds(lambda a, b: lambda i, m: -a * np.sqrt(i) - b * np.log(i) / m, st.floats(0.2, 1.0), st.floats(0, 1)),
    st.builds(lambda a, b: lambda i, m: -a * np.log(i) - b * i / np.sqrt(m), st.floats(0.3, 1.0), st.floats(0, 0.1)),
    st.builds(lambda a: lambda i, m: -a * np.log(i) + 0.5 * np.log(m), st.floats(0.5, 1.0)),
)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(laws, st.sampled_from([3, 6, 11]))
def test_planted_laws_are_recovered_between_and_at_the_measured_numbers_of_workers(law, m):
    model = ConvergenceModel.fit(curves(law), optimum=OPTIMUM)
    assert model.residual < 0.03
    for workers in (m, 4):
        error = model.log_suboptimality(STEPS, workers) - law(STEPS, workers)
        assert np.sqrt(np.mean(error**2)) < 0.06
    loss = OPTIMUM + math.exp(law(40.0, m))
    assert model.iterations_to(loss, m).value == pytest.approx(40, rel=0.15)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(laws, st.integers(0, 1000))
def test_left_out_errors_are_what_a_worker_count_that_was_never_run_shows(law, seed):
    """Within a factor: four numbers are left out once each, and the truth is known for those between."""
    noise = 0.05
    model = ConvergenceModel.fit(curves(law, noise=noise, seed=seed), optimum=OPTIMUM)
    assert set(model.leave_one_out) == set(MEASURED)
    shown = [np.sqrt(np.mean((model.log_suboptimality(STEPS, m) - law(STEPS, m)) ** 2)) for m in (3, 6, 12)]
    inner = [model.leave_one_out[m] for m in (2, 4, 8)]
    assert max(shown) < 2 * math.hypot(max(inner), noise)
    assert min(inner) > 0.4 * noise  # noise itself cannot be predicted, nor hidden


def test_intervals_hold_a_new_run_about_as_often_as_they_say():
    inside = {True: [], False: []}
    for seed in range(3):

        def law(i, m, c0=0.05 + 0.05 * seed):
            return cocoa(i, m, c0=c0)

        model = ConvergenceModel.fit(curves(law, noise=0.05, seed=seed), optimum=OPTIMUM)
        for run in curves(law, (2, 3, 6, 8, 12), noise=0.05, seed=1000 + seed):
            for i in (5, 20, 50):
                found = model.predict(i, run.workers)
                least = run.losses[:i].min()
                inside[run.workers in MEASURED].append(found.low <= least <= found.high)
                assert not found.extrapolated
    assert np.mean(inside[True]) >= 0.8
    assert np.mean(inside[False]) >= 0.9


def test_a_law_of_workers_that_changes_outside_is_an_error_that_shows():
    """At 16 workers something new happens: no model from 1 to 8 can know, and leaving 16 out says so."""

    def law(i, m):
        return cocoa(i, m) + (2.0 if m == 16 else 0.0)

    model = ConvergenceModel.fit(curves(law), optimum=OPTIMUM)
    assert model.leave_one_out[16] > 1.0
    assert model.error([10.0], 32)[0] > 1.0


def test_the_first_iterations_must_predict_the_last():
    """A curve that stops falling after what is fitted first: the forward error is as large as the bend."""
    bent = ConvergenceModel.fit(curves(lambda i, m: -0.1 * np.minimum(i, 36.0)), optimum=OPTIMUM)
    straight = ConvergenceModel.fit(curves(lambda i, m: -0.1 * i), optimum=OPTIMUM)
    assert straight.forward < 0.05
    assert bent.forward > 0.5
    assert bent.error([70.0], 4)[0] > bent.error([60.0], 4)[0]


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.floats(-2.0, 2.0), st.floats(0.03, 0.1), st.sampled_from([1.0, 30.0]))
def test_an_unknown_optimum_is_found_where_the_law_tells_it(optimum, rate, scale):
    made = curves(lambda i, m: math.log(scale) - rate * i / np.sqrt(m), optimum=optimum)
    model = ConvergenceModel.fit(made)
    assert model.optimum == pytest.approx(optimum, abs=0.01 * scale)
    assert model.iterations_to(optimum + scale * 0.5, 3).value == pytest.approx(
        math.log(2) * math.sqrt(3) / rate, rel=0.1
    )


def test_an_unknown_optimum_is_not_below_its_bound():
    made = curves(lambda i, m: -0.4 * np.log(i), optimum=0.0)
    assert ConvergenceModel.fit(made, lower_bound=0.0).optimum >= -1e-5


def test_the_least_loss_so_far_is_what_is_fitted():
    """A noisy curve: what is asked for is when a loss is first reached."""
    losses = OPTIMUM + np.exp(-0.05 * STEPS) * (1 + np.where(STEPS % 2 == 0, 0.5, 0.0))
    model = ConvergenceModel.fit([Curve(workers=2, iterations=STEPS, losses=losses)], optimum=OPTIMUM)
    assert model.predict(40, 2).value == pytest.approx(OPTIMUM + math.exp(-0.05 * 39), rel=0.05)


def test_estimates_outside_the_measurements_are_marked():
    model = ConvergenceModel.fit(curves(cocoa, workers=(2, 4, 8)), optimum=OPTIMUM)
    assert [model.predict(30, m).extrapolated for m in (1, 2, 4, 5, 8, 16)] == [True, False, False, False, False, True]
    assert model.predict(61, 2).extrapolated  # 60 were run
    assert not model.iterations_to(OPTIMUM + math.exp(cocoa(50, 2)), 2).extrapolated
    assert model.iterations_to(OPTIMUM + math.exp(cocoa(90, 2)), 2).extrapolated


def test_what_is_never_reached_is_none():
    flat = ConvergenceModel.fit(curves(lambda i, m: -0.01 * np.log(i)), optimum=OPTIMUM)
    assert flat.iterations_to(OPTIMUM + 0.1, 4) is None
    assert flat.iterations_to(OPTIMUM, 4) is None
    alone = ConvergenceModel.fit(curves(cocoa, workers=(4,)), optimum=OPTIMUM)
    assert alone.leave_one_out == {}
    assert alone.predict(10, 4).high < math.inf
    assert alone.predict(10, 5).high == math.inf  # nothing is known of how workers matter


# A law whose best number of workers lies inside, and depends on the target: steps count at first, passes later.
F = SystemModel.fit([1, 2, 4, 8, 16], [1 / m + 0.02 * m for m in (1, 2, 4, 8, 16)])


def passes_matter(i, m):
    return -0.8 * np.log(i) - 0.03 * i / m


def true_time_to(gap, m):
    i = np.geomspace(1, 5000, 40_000)
    return float(i[np.argmax(passes_matter(i, m) <= math.log(gap))] * (1 / m + 0.02 * m))


def test_the_best_number_of_workers_is_interior_depends_on_the_target_and_is_found():
    iterations = np.arange(1.0, 201.0)
    made = curves(passes_matter, noise=0.02, seed=3, iterations=iterations)
    h = TimeToLoss(step_s=F.predict, convergence=ConvergenceModel.fit(made, optimum=OPTIMUM))
    best = {}
    for gap in (0.3, 0.01):
        truth = {m: true_time_to(gap, m) for m in range(1, 17)}
        expected_s = {m: h.time_to(OPTIMUM + gap, m).value for m in range(1, 17)}
        best[gap] = min(expected_s, key=expected_s.get)
        assert truth[best[gap]] <= 1.03 * min(truth.values())
        assert 1 < best[gap] < 16
        assert truth[1] > 1.2 * truth[best[gap]] < truth[16]
        assert expected_s[best[gap]] == pytest.approx(truth[best[gap]], rel=0.15)
    assert best[0.3] > best[0.01]


def test_the_loss_at_a_deadline_is_the_inverse_of_the_time_to_it():
    h = TimeToLoss(step_s=F.predict, convergence=ConvergenceModel.fit(curves(cocoa), optimum=OPTIMUM))
    for m in (2, 5):
        reached = h.time_to(OPTIMUM + 0.05, m)
        assert h.loss(reached.value, m).value == pytest.approx(OPTIMUM + 0.05, rel=0.01)
        assert reached.low < reached.value < reached.high
    assert h.time_to(OPTIMUM, 1) is None is h.time_to(OPTIMUM - 1, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ConvergenceModel.fit([]), "at least one curve"),
        (lambda: ConvergenceModel.fit(curves(cocoa), optimum=0.5), "must be below every loss"),
        (lambda: Curve(workers=0, iterations=STEPS, losses=STEPS), "1 worker or more, not 0"),
        (lambda: Curve(workers=1, iterations=STEPS[:3], losses=STEPS[:3]), "4 losses or more"),
        (lambda: Curve(workers=1, iterations=STEPS - 1, losses=STEPS), "ascend from 1"),
        (lambda: Curve(workers=1, iterations=STEPS, losses=STEPS * np.nan), "be finite"),
    ],
)
def test_refused_in_one_sentence(call, says):
    with pytest.raises(UsageError, match=says):
        call()
