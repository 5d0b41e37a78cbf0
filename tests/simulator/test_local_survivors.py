"""On one simulated machine, methods with local steps go on without workers that are killed, as real runs do."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from chosen import each_value
from exact_codec import exact_codec  # noqa: F401
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Faults
from processes.local_reference import (
    LOCAL,
    METHODS,
    OUTER,
    STREAM,
    WARM,
    WHOLE,
    LocalReference,
    Method,
    Training,
    coded,
    steps_in,
)
from rounds import EPOCHS, OPTIMIZERS, SPECS, Loop, in_order, made, shuffled, task_file

NUM_BATCHES = 7  # three workers have rounds of 3, 3 and 1
# Moving a vector takes about as long as computing a gradient, so that workers die in the middle of means, too.
CLUSTER = {"compute_s": 0.01, "core_bytes_per_s": 2.5e4, "detection_s": 0.05, "collective": "memory"}


def training_on(epochs):
    data = lambda batch: epochs[batch[0] // NUM_BATCHES][batch[0] % NUM_BATCHES]  # noqa: E731
    return Training(made, OPTIMIZERS["momentum"], data, nn.functional.cross_entropy)


def loop_run(method, faults, cluster):
    loop = Loop("momentum", NUM_BATCHES, "clear")
    run = pl.simulate(loop, cluster=cluster, algorithm=method.spec, faults=faults)
    return run, list(loop.models.values()), training_on([in_order(NUM_BATCHES)] * EPOCHS)


def task_run(method, faults, cluster, name):
    config = pl.TrainConfig(task=name, algorithm=method.spec, epochs=EPOCHS, **SPECS["momentum"])
    simulation = TaskSimulation(config, cluster, faults=faults)
    run, x = simulation.run(), torch.empty(simulation.binding.num_elements)
    simulation.machine.shared.snapshot(x)
    return run, [simulation.binding.views(x)], training_on(shuffled(NUM_BATCHES))


def check(method, found, last, unrecorded=None):
    """Survivors are as one process would have trained; each batch counts once.

    Args:
        found: the run, its models, and what its workers train.
        last: as for the reference.
        unrecorded: by worker: a step that follows its last record.
    """
    run, models, training = found
    assert run.result["workers_lost"] == sorted(last)
    steps = steps_in(run.records)
    for worker, step in (unrecorded or {}).items():
        steps[worker].append(step)
    reference = LocalReference(method, training, steps, last)
    expected = list(reference.train().values())
    for own in models:
        for first, one, other in zip(models[0], own, expected, strict=True):
            assert torch.equal(first, one)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert reference.counted == dict.fromkeys(range(EPOCHS * NUM_BATCHES), 1)


def at_step(kills):
    faults = Faults()
    for worker, step in kills.items():
        faults = faults.kill(worker=worker, step=step)
    return faults


def steps_made(run, kills):
    return {worker: len(run.records[worker]) for worker in kills}


KILLS = [{0: 2}, {2: 1}, {0: 2, 2: 2}, {0: 1, 1: 3}, {0: 3}, {1: 4}]
ALL = [*METHODS, coded(LOCAL), coded(STREAM)]


def named(one):
    return getattr(one, "spec", str(one))


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return task_file(tmp_path_factory.mktemp("task"), NUM_BATCHES)


@pytest.mark.parametrize(("method", "kills"), each_value(ALL, KILLS), ids=named)
def test_a_loop_goes_on(method, kills):
    run, *_ = found = loop_run(method, at_step(kills), Cluster(workers=3, **CLUSTER))
    check(method, found, steps_made(run, kills))
    assert sorted(run.returned) == [worker for worker in range(3) if worker not in kills]


@pytest.mark.parametrize(("method", "kills"), each_value(ALL, KILLS[::-1]), ids=named)
def test_a_task_goes_on(method, kills, name):
    run, *_ = found = task_run(method, at_step(kills), Cluster(workers=3, **CLUSTER), name)
    check(method, found, steps_made(run, kills))


@pytest.mark.parametrize("method", [LOCAL, WARM, WHOLE, OUTER, STREAM], ids=lambda one: one.spec)
@pytest.mark.parametrize("kills", [{1: 2}, {0: 2}, {0: 1, 2: 3}], ids=str)
def test_replacements_take_part(method, kills, tmp_path):
    """A replacement comes some steps later, with what the first of the others has."""
    name, epochs = task_file(tmp_path, NUM_BATCHES, "made"), 8
    config = pl.TrainConfig(task=name, algorithm=method.spec, epochs=epochs, restarts=2, **SPECS["momentum"])
    cluster = Cluster(workers=3, restart_s=0.1, **CLUSTER)
    simulation = TaskSimulation(config, cluster, faults=at_step(kills))
    run, x = simulation.run(), torch.empty(simulation.binding.num_elements)
    assert run.result["outcome"] == "stopped"
    assert (run.result["workers_lost"], run.result["restarts"]) == (sorted(kills), len(kills))
    simulation.machine.shared.snapshot(x)
    steps, lives = steps_in(run.records), {}
    for worker in kills:
        rows = run.records[worker]
        came = rows["step"][rows["incarnation"] == 1].tolist()
        made = int((rows["incarnation"] == 0).sum())
        steps[worker] = steps[worker][:made] + [[[]]] * (came[0] - 1 - made) + steps[worker][made:]
        lives[worker] = [(1, made), (came[0], math.inf)]
    reference = LocalReference(method, training_on(shuffled(NUM_BATCHES, epochs)), steps, {}, lives=lives)
    for one, other in zip(simulation.binding.views(x), reference.train().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert reference.counted == dict.fromkeys(range(epochs * NUM_BATCHES), 1)


DEATHS = (
    st.sampled_from(METHODS),
    st.integers(2, 5),
    st.dictionaries(st.integers(0, 4), st.integers(1, 7), min_size=1, max_size=4),
    st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(*DEATHS)
def test_whoever_dies_whenever(name, method, workers, kills, is_task):
    check_deaths(name, method, workers, kills, is_task)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(*DEATHS)
def test_a_thousand_runs_with_deaths(name, method, workers, kills, is_task):
    check_deaths(name, method, workers, kills, is_task)


def check_deaths(name, method, workers, kills, is_task):
    kills = {worker: step for worker, step in kills.items() if worker < workers}
    kills = dict(list(kills.items())[: workers - 1])
    cluster = Cluster(workers=workers, **CLUSTER)
    make = task_run if is_task else loop_run
    run, *_ = found = make(method, at_step(kills), cluster, *([name] if is_task else []))
    check(method, found, steps_made(run, run.result["workers_lost"]))


@pytest.mark.parametrize(("method", "worker"), each_value(ALL, [0, 2]), ids=named)
def test_a_worker_dies_at_any_instant(method, worker, name):
    """If it has brought its model to a mean, its last step counts there, of which it leaves no record."""
    cluster = Cluster(workers=3, **CLUSTER).slow(worker=1, factor=1.5)
    run, *_ = task_run(method, None, cluster, name)
    planned, (begun_s, ended_s) = steps_in(run.records)[worker], run.records[1]["ended_s"][[0, 3]]
    num_unrecorded = 0
    for at_s in np.linspace(begun_s, ended_s, 15).tolist():
        run, *_ = found = task_run(method, Faults().kill(worker=worker, at_s=at_s), cluster, name)
        made = len(run.records[worker])
        try:
            check(method, found, {worker: made})
        except AssertionError:
            check(method, found, {worker: made + 1}, {worker: planned[made]})
            num_unrecorded += 1
    assert (num_unrecorded > 0) == (method.period < 5 and not (method.delay and method.fragments == 1))


def test_the_living_choose_the_delay(name):
    cluster = Cluster(workers=3, compute_s=0.01, core_bytes_per_s=1e5, collective="memory")
    method = Method("da-sgd(period=6, delay=auto)", 6)
    delays = [task_run(method, faults, cluster, name)[0].result["delay"] for faults in (None, at_step({0: 2}))]
    assert delays[0] == delays[1] < 6
