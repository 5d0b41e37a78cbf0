"""The parts of an advice by themselves: candidates, records to rates, short runs, intervals, processes."""

import doctest
import importlib
import math
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advice.made_up import made_up
from advice.planted import Law, Planted
from forked import AGAINST_HANGS_S
from paceline.advice.answer import Candidate, Prediction, Target
from paceline.advice.candidates import DEFAULT, OMITTED, candidates
from paceline.advice.pool import Pool
from paceline.advice.prediction import order, progress_error
from paceline.advice.program import Observed, Shape, mean_rate, observed, steady_rates
from paceline.advice.programs import TaskProgram, virtual_rate
from paceline.advice.short_runs import ShortRuns, designed
from paceline.advice.simulations import Job, matched, simulate, with_workers
from paceline.advice.tables import ranking
from paceline.advice.words import cautions
from paceline.algorithms import registry
from paceline.errors import PacelineError
from paceline.planner.estimate import Estimate, LogSpread, half_width
from paceline.records.run_data import RunData
from paceline.records.step_record import RECORD_DTYPE
from paceline.simulator import Cluster


def test_every_algorithm_is_compared_or_has_a_reason_why_not():
    named = {registry.name_of(type(registry.build(spec))) for spec in DEFAULT}
    assert named | set(OMITTED) == set(registry.names())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 64))
def test_candidates_have_each_algorithm_with_the_most_workers_and_one_worker_once(most):
    found, said = candidates(most)
    assert [one for one in found if one.workers == 1] == [Candidate(algorithm="sequential", workers=1)]
    assert max(one.workers for one in found) == most
    assert len(set(found)) == len(found)
    tried = {one.workers for one in found}
    gaps = set(range(1, most + 1)) - tried
    assert any("workers, because numbers between them were tried" in one for one in said) is bool(gaps)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(2, 40), st.integers(1, 12))
def test_designed_numbers_have_the_most_and_no_more_than_asked_for(most, number):
    counts = list(range(2, most + 1))
    chosen = designed(counts, number)
    assert most in chosen
    assert set(chosen) <= set(counts)
    assert len(chosen) == len(set(chosen)) <= max(number, 1)


def rows_of(ended_s, samples=10, versions=None):
    rows = np.zeros(len(ended_s), RECORD_DTYPE)
    rows["ended_s"], rows["gradient_ended_s"] = ended_s, ended_s
    rows["samples"] = samples
    rows["applied_version"] = np.arange(1, len(ended_s) + 1) if versions is None else versions
    rows["loss"] = 1.0
    return rows


def test_steady_rates_leave_out_the_beginning_and_gradients_that_were_dropped():
    late = np.arange(1.0, 10.0, 0.01)  # worker 1 begins after a second
    early = np.arange(0.0, 10.0, 0.02)
    dropped = rows_of(late, versions=-np.ones(len(late), int))
    run = RunData(records={0: rows_of(early), 1: rows_of(late), 2: dropped})
    rates = steady_rates(run, gossip=False)
    assert len(rates) == 8
    assert rates == pytest.approx([1500.0] * 8, rel=0.02)
    assert steady_rates(RunData(records={0: rows_of(early[:10])}), gossip=False) == ()
    assert steady_rates(RunData(), gossip=False) == ()


def test_a_mean_rate_is_within_its_interval_as_often_as_it_says():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        one = mean_rate(tuple(random.normal(100.0, 5.0, 8)))
        held += one.low <= 100.0 <= one.high
    assert 0.87 <= held / 1000 <= 0.93
    exact = mean_rate((7.0,))
    assert exact.low == exact.value == exact.high == 7.0


def test_what_was_observed_of_a_loss_counts_from_a_full_window():
    rows = rows_of(np.arange(1, 301) / 100)
    rows["loss"] = np.linspace(3.0, 0.0, 300)
    result = {"wall_s": 3.0, "samples": 3000, "outcome": "stopped"}
    run = RunData(records={0: rows}, result=result)
    found = observed(run, Target(loss=1.0), real=False)
    assert found.reached_s is not None
    at = round(100 * found.reached_s)
    assert np.mean(rows["loss"][at - 100 : at]) <= 1.0 < np.mean(rows["loss"][at - 101 : at - 1])
    assert found.reached_samples == 10 * at
    assert found.outcome == "converged"
    assert found.rates == (1000.0,)
    assert observed(run, Target(loss=0.1), real=False).reached_s is None


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.floats(0.5, 2.0))
def test_progress_error_is_how_many_times_as_many_samples_simulations_need(factor):
    program, one, target = (
        Planted({"hogwild": Law()}, every=5),
        Candidate(algorithm="hogwild", workers=2),
        Target(accuracy=0.95),
    )
    real = program.run(one, target, for_s=1.0, seed=0, slow={})
    cluster = Cluster(workers=2, compute_s=0.01)
    simulated = program.simulate(one, cluster, target, limit_s=10.0, limit_samples=10**6, seed=0)
    curve = tuple((time_s, samples * factor, value) for time_s, samples, value in simulated.curve)
    assert progress_error(target, real, [Observed(**{**_fields(simulated), "curve": curve})]) == pytest.approx(
        math.log(factor), abs=0.02
    )
    assert progress_error(target, real, []) is None


def _fields(one):
    return {name: getattr(one, name) for name in Observed.__slots__}


def test_parts_of_an_interval_add_up_in_squares():
    known = [LogSpread(deviation=0.3, freedom=math.inf), LogSpread(deviation=0.4, freedom=math.inf)]
    assert half_width(known) == pytest.approx(1.645 * 0.5, rel=1e-3)
    assert half_width([LogSpread(deviation=0.3, freedom=1.0)]) == pytest.approx(6.314 * 0.3, rel=1e-3)
    assert half_width([]) == 0.0


def test_a_rate_of_what_was_not_run_is_the_system_models():
    program = Planted({"hogwild": Law(cost=0.25)})
    trials = ShortRuns(program, Target(accuracy=0.9), {})
    made = [Candidate(algorithm="hogwild", workers=m) for m in (1, 2, 4, 6)]
    for candidate in made:
        trials.make(candidate, for_s=1.0, seed=0)
    for m in (3, 5):
        rate = trials.rate(Candidate(algorithm="hogwild", workers=m))
        assert rate.value == pytest.approx(program.laws["hogwild"].rate(m), rel=0.05)
        assert rate.extrapolation
    assert not trials.rate(made[0]).extrapolation
    assert trials.step_error("hogwild") < 0.05
    with pytest.raises(KeyError):
        trials.rate(Candidate(algorithm="leashed", workers=2))


@pytest.mark.parametrize("algorithm", ["hogwild", "lockstep", "ad-psgd"])
def test_a_matched_cluster_is_as_fast_as_was_measured(algorithm):
    program, shape = TaskProgram(name="digits-mlp"), Shape(num_parameters=5000, batch_size=16)
    one = Candidate(algorithm=algorithm, workers=3)
    base = with_workers(Cluster(), 3, {0: 4.0})
    found = matched(program, one, base, shape, 20_000.0, 0.1)
    assert virtual_rate(one, found, shape) == pytest.approx(20_000.0, rel=0.011)
    assert found.factor(0) == 4.0


def test_slow_workers_that_are_not_among_them_play_no_part():
    cluster = Cluster(workers=4).slow_link(0, 3, 5.0)
    assert with_workers(cluster, 2, {0: 2.0, 3: 9.0}).slowness == ((0, 2.0),)
    assert with_workers(cluster, 2, {}).link_factors == ()


def test_a_simulation_that_fails_is_an_outcome_and_its_first_line_says_why():
    class Failing(Planted):
        def simulate(self, *args, **named):
            raise PacelineError("Worker 1 failed: there is no more.\nTraceback: ...")

    job = Job(
        program=Failing({"hogwild": Law()}), candidate=Candidate(algorithm="hogwild", workers=2), seed=0,
        cluster=Cluster(workers=2), shape=Shape(num_parameters=10, batch_size=10), target=Target(accuracy=0.9),
        limit_s=1.0, limit_samples=100,
    )  # fmt: skip
    found = simulate(job)
    assert found.run.outcome == "crashed"
    assert found.run.reason == "Worker 1 failed: there is no more"


def test_a_pool_answers_in_the_jobs_order_and_says_what_failed():
    until_s = time.monotonic() + AGAINST_HANGS_S
    with Pool(2) as pool:
        found = pool.map(os.path.basename, ["a/b", "c", "d/e"], begin_until_s=until_s, end_until_s=until_s)
        assert found == ["b", "c", "e"]
        with pytest.raises(PacelineError, match="ValueError in a simulation: math domain error"):
            pool.map(math.sqrt, [-1.0], begin_until_s=until_s, end_until_s=until_s)
        assert pool.map(math.sqrt, [4.0], begin_until_s=0.0, end_until_s=0.0) == [None]
        began_s = time.monotonic()
        assert pool.map(time.sleep, [50.0], begin_until_s=until_s, end_until_s=began_s + 0.2) == [None]
        assert time.monotonic() - began_s < 40
        assert pool.map(math.sqrt, [4.0], begin_until_s=until_s, end_until_s=until_s) == [2.0]
    with pytest.raises(PacelineError, match="has ended"), Pool(1) as pool:
        pool.map(os._exit, [3], begin_until_s=until_s, end_until_s=until_s)


def test_machines_apart_have_no_memory_to_share():
    found, said = candidates(4, one_machine=False)
    names = {one.algorithm for one in found}
    assert {"sequential", "lockstep", "all-reduce", "ad-psgd"} <= names
    assert not {"hogwild", "leashed"} & names
    assert any(one.startswith("hogwild, leashed, which need shared memory") for one in said)
    assert {one.algorithm for one in candidates(4, ["hogwild"], one_machine=False)[0]} == {"hogwild"}, "named: tried"


def test_the_doctests_hold():
    found = doctest.testmod(importlib.import_module("paceline.advice.candidates"))
    assert found.failed == 0 < found.attempted


def test_what_was_not_measured_differs_from_what_does_not_arrive():
    speed = Estimate(value=1.0, low=1.0, high=1.0)
    common = {"candidate": Candidate(algorithm="hogwild", workers=2), "time_s": None, "samples_per_s": speed}
    never = Prediction(**common, samples_to_target=None, simulated_s=(math.inf,), why_not="it ends before")
    unknown = Prediction(**common, samples_to_target=None, why_not="it was not simulated: the budget was spent")
    rows = ranking(replace(made_up(), ranked=(never, unknown))).rows
    assert [row[1].text for row in rows] == ["not reached", "not measured"]


def predicted(algorithm, workers, seconds):
    estimate = None if seconds is None else Estimate(value=seconds, low=0.9 * seconds, high=1.1 * seconds)
    rate = Estimate(value=1.0, low=1.0, high=1.0)
    candidate = Candidate(algorithm=algorithm, workers=workers)
    return Prediction(candidate=candidate, time_s=estimate, samples_per_s=rate, samples_to_target=estimate)


ASYNC, BACKUPS = "parameter-server(mode=async)", "parameter-server(mode=sync(backups=1))"


@pytest.mark.parametrize(
    ("times_s", "said"),
    [
        ({(BACKUPS, 4): 10.0, (ASYNC, 4): 30.0}, f"{BACKUPS} with 4 workers ranks before {ASYNC} with 4 workers."),
        ({(BACKUPS, 4): 10.0, (ASYNC, 4): None}, f"{BACKUPS} with 4 workers ranks before {ASYNC} with 4 workers."),
        ({("sequential", 1): 10.0, ("hogwild", 2): 20.0}, "sequential with 1 worker ranks before hogwild with 2 workers."),
        ({("ad-psgd", 4): 5.0, (BACKUPS, 4): 10.0, (ASYNC, 4): 30.0}, None),
        ({(BACKUPS, 4): 10.0, ("lockstep", 4): 30.0}, None),
        ({(ASYNC, 4): 10.0}, None),
        ({(BACKUPS, 4): None, (ASYNC, 4): None}, None),
    ],
)  # fmt: skip
def test_asynchronous_sgd_is_advised_against_where_waiting_is_no_slower(times_s, said):
    ranked = order([predicted(*one, seconds) for one, seconds in times_s.items()], Target(accuracy=0.9))
    assert cautions(ranked) == ([f"Asynchronous SGD does not pay off here: {said}"] if said is not None else [])


def test_overlapping_intervals_are_a_close_call():
    ranked = order([predicted(BACKUPS, 4, 10.0), predicted("lockstep", 4, 10.5)], Target(accuracy=0.9))
    assert cautions(ranked) == [
        f"A close call: the intervals of lockstep with 4 workers overlap with that of {BACKUPS} with 4 workers."
    ]
