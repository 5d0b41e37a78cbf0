"""On one simulated machine, lockstep methods go on without workers that are killed, as real runs do."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from chosen import each_value
from exact_codec import CODED, exact_codec  # noqa: F401
from paceline.errors import AlgorithmWarning
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, Faults
from paceline.simulator.newcomers import SimulatedNewcomers
from rounds import EPOCHS, OPTIMIZERS, SPECS, Loop, backward, in_order, made, mixture, shuffled, task_file

METHODS = ["lockstep", "all-reduce"]
NUM_BATCHES = 7  # three workers have rounds of 3, 3 and 1
STEP_S = 0.01
# Moving a vector takes about as long as computing a gradient, so that workers die in the middle of means, too.
CLUSTER = {"compute_s": STEP_S, "core_bytes_per_s": 2.5e4, "detection_s": 0.05, "collective": "memory"}


def reference(epochs, deaths, workers=3, make=made):
    """One process trains on each round's mean; returns its model, and for each mean the workers in it, with their batches.

    Args:
        epochs: lists of batches.
        deaths: by worker: the first round that goes on without it; its batch there comes first in the next round.
    """
    model, alive, means = make(), list(range(workers)), []
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    rounds = itertools.count(1)
    for epoch, batches in enumerate(epochs):
        left = list(range(len(batches)))
        while left:
            dealt, number = dict(zip(alive, left, strict=False)), next(rounds)
            alive = [worker for worker in alive if deaths.get(worker) != number]
            counted = [dealt[worker] for worker in alive if worker in dealt]
            left = sorted(set(left) - set(counted))
            if counted:
                optimizer.zero_grad()
                backward(model, [batches[batch] for batch in counted])
                optimizer.step()
                means.append({one: [epoch * len(batches) + dealt[one]] if one in dealt else [] for one in alive})
    return [one.detach() for one in model.parameters()], means


def loop_run(method, faults, workers, make=made):
    """A user loop: the run and the models of the survivors."""
    loop = Loop("momentum", NUM_BATCHES, "clear", make)
    cluster = Cluster(workers=workers, **CLUSTER)
    run = pl.simulate(loop, cluster=cluster, algorithm=method, faults=faults)
    return run, list(loop.models.values())


def task_run(method, faults, cluster, folder, make=made):
    """A task: the run and the models of the survivors."""
    config = pl.TrainConfig(
        task=task_file(folder, NUM_BATCHES, make.__name__), algorithm=method, epochs=EPOCHS, **SPECS["momentum"]
    )
    simulation = TaskSimulation(config, cluster, faults=faults)
    run, shared = simulation.run(), simulation.machine.shared
    return run, [simulation.binding.views(shared.workers[one].x) for one in shared.model_ids()]


def check(run, models, epochs, deaths, workers=3, make=made):
    """Survivors and records are as the reference, which trains on each batch once; `records_lost` counts what is missing."""
    expected, means = reference(epochs, deaths, workers, make)
    assert run.result["workers_lost"] == sorted(deaths)
    assert len(models) == workers - len(deaths)
    for own in models:
        for first, one, other in zip(models[0], own, expected, strict=True):
            assert torch.equal(first, one)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert run.result["version"] == run.result["steps"] == len(means)
    lost = []
    for version, batches in enumerate(means, start=1):
        for worker, rows in run.records.items():
            made_it = rows[rows["applied_version"] == version]
            if worker in batches and not len(made_it):
                lost.append(worker)
            else:
                assert made_it["batch"][made_it["samples"] > 0].tolist() == batches.get(worker, [])
    batches = [batch for one in means for own in one.values() for batch in own]
    assert sorted(batches) == list(range(len(epochs) * NUM_BATCHES))
    assert set(lost) <= set(deaths)
    assert run.result["records_lost"] == len(lost) == len(set(lost))


def at_step(kills):
    """Workers are killed as they begin their k-th gradient."""
    faults = Faults()
    for worker, step in kills.items():
        faults = faults.kill(worker=worker, step=step)
    return faults


DEATHS = pytest.mark.parametrize(
    ("workers", "kills", "deaths"),
    [
        (3, {0: 2}, {0: 2}),
        (3, {1: 2}, {1: 2}),
        (3, {2: 1}, {2: 1}),
        (3, {0: 2, 2: 2}, {0: 2, 2: 2}),
        (4, {0: 1, 1: 3, 3: 4}, {0: 1, 1: 3, 3: 6}),  # worker 3 has no batch in rounds 3 and 4
        (3, {0: 3}, {0: 3}),
        (2, {1: 4}, {1: 5}),
        (4, {2: 2}, {2: 2}),
    ],
    ids=[
        *("worker 0", "another", "in the first round", "two at once", "all but one", "alone in an epoch's last round"),
        *("in the second epoch's first round", "in an epoch's last round"),
    ],
)


@pytest.mark.parametrize("method", [*METHODS, CODED])
@DEATHS
def test_a_loop_goes_on_as_one_process_with_the_batches_that_are_dealt_again(method, workers, kills, deaths):
    run, models = loop_run(method, at_step(kills), workers)
    check(run, models, [in_order(NUM_BATCHES)] * EPOCHS, deaths, workers)
    assert sorted(run.returned) == [worker for worker in range(workers) if worker not in kills]


@pytest.mark.parametrize("method", [*METHODS, CODED])
@DEATHS
def test_a_task_goes_on_as_one_process_with_the_batches_that_are_dealt_again(method, workers, kills, deaths, tmp_path):
    run, models = task_run(method, at_step(kills), Cluster(workers=workers, **CLUSTER), tmp_path)
    check(run, models, shuffled(NUM_BATCHES), deaths, workers)


@pytest.mark.parametrize(("method", "at"), each_value([*METHODS, CODED], [(0, 2), (2, 2), (0, 3)]), ids=str)
def test_a_gradient_counts_if_its_worker_brought_it_and_otherwise_its_batch_is_dealt_again(method, at, tmp_path):
    """Killed at any instant of a round: as it computes, moves vectors, waits or updates; in round 3 it alone has a batch."""
    worker, round = at
    cluster = Cluster(workers=3, **CLUSTER).slow(worker=1, factor=1.5)
    run, _ = task_run(method, None, cluster, tmp_path)
    begun_s, ended_s = run.records[1]["ended_s"][round - 2 : round]
    found = set()
    for at_s in np.linspace(begun_s, ended_s, 12).tolist():
        run, models = task_run(method, Faults().kill(worker=worker, at_s=at_s), cluster, tmp_path)
        counted = int(run.records[worker]["applied_version"].max(initial=0)) + run.result["records_lost"]
        check(run, models, shuffled(NUM_BATCHES), {worker: counted + 1})
        found.add((counted, run.result["records_lost"]))
    assert {(round - 1, 0), (round, 1)} <= found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kills", [{0: 2}, {1: 1, 2: 3}], ids=str)
def test_parameters_that_only_the_dead_used_are_left_out(method, kills, tmp_path):
    run, models = loop_run(method, at_step(kills), 3, mixture)
    check(run, models, [in_order(NUM_BATCHES)] * EPOCHS, kills, make=mixture)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_take_as_long_as_those_of_as_many_workers(method):
    """Once the others know of the death."""

    def run_of(workers, faults=None):
        config = pl.TrainConfig(algorithm=method, workers=workers, steps=10)
        cluster = Cluster(workers=workers, **CLUSTER, bus_bytes_per_s=4e4)  # shared by all
        options = {"cluster": cluster, "faults": faults, "timing_only": True, "num_parameters": 32}
        return pl.simulate_task(config, **options)

    run, fewer = run_of(4, at_step({2: 4})), run_of(3)
    assert [len(rows) for rows in run.records.values()] == [10, 10, 3, 10]
    ended_s, expected_s = run.records[0]["ended_s"], fewer.records[0]["ended_s"]
    assert np.diff(ended_s)[3:] == pytest.approx(np.diff(expected_s)[3:], rel=1e-3)
    assert np.diff(ended_s)[0] > 1.1 * np.diff(expected_s)[0]
    assert ended_s[3] > ended_s[2] + CLUSTER["detection_s"]
    assert run.result["outcome"] == "stopped"


@pytest.mark.parametrize("method", METHODS)
def test_what_a_worker_owed_is_done_by_the_others(method):
    """Killed between two barriers of a mean: each of the two others reduces its part, too: 4/3 vectors more."""
    config = pl.TrainConfig(algorithm=method, workers=3, steps=2)
    cluster = Cluster(workers=3, compute_s=STEP_S, collective="memory", detection_s=1e-9, core_bytes_per_s=1e4)

    def ended_s(faults):
        options = {"timing_only": True, "num_parameters": 32, "cluster": cluster, "faults": faults}
        return pl.simulate_task(config, **options).records[0]["ended_s"][0]

    vector_s = 4 * 32 / 1e4
    inside_s = STEP_S + 2 * vector_s + 0.5 * vector_s  # it has copied its vector, and now reduces its part
    assert ended_s(Faults().kill(worker=1, at_s=inside_s)) == pytest.approx(ended_s(None) + 4 / 3 * vector_s, rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_whose_workers_all_die_counts_what_they_did(method, tmp_path):
    run, _ = task_run(method, at_step({0: 2, 1: 3, 2: 5}), Cluster(workers=3, **CLUSTER), tmp_path)
    assert (run.result["outcome"], run.result["workers_lost"]) == ("crashed", [0, 1, 2])
    assert run.result["version"] == run.result["steps"] > 3
    with pytest.raises(pl.WorkerLostError, match="All workers were killed"):
        loop_run(method, at_step({0: 2, 1: 3, 2: 5}), 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_worker_that_is_alive_leads(method):
    """Its buffers are evaluated and the run's at the end, as are the weights that its loop has left."""
    evaluated, ended = [], {}

    def train():
        model = nn.Linear(3, 2)
        model.register_buffer("owner", torch.tensor(-1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        evaluate = lambda model: evaluated.append(model.owner.item()) or {"loss": 0.0}  # noqa: E731
        with pl.attach(model, optimizer, evaluate=evaluate) as worker:
            for x, y in worker.batches(in_order(NUM_BATCHES)):
                model.owner.fill_(worker.worker_id)
                optimizer.zero_grad()
                backward(model, [(x, y)])
                optimizer.step()
                assert worker.sum(1) in (3, 2)
            model.load_state_dict({**model.state_dict(), "bias": torch.full((2,), 10.0 + worker.worker_id)})
        ended[worker.worker_id] = model.state_dict()

    cluster = Cluster(workers=3, **CLUSTER)
    pl.simulate(
        train, cluster=cluster, algorithm=method, faults=at_step({0: 2}), limit_samples=10**6, evaluate_every_samples=4
    )
    assert set(ended) == {1, 2}
    for state in ended.values():
        assert state["owner"] == 1
        assert state["bias"].tolist() == [11.0, 11.0]
    assert evaluated[0] == 0
    assert evaluated[-1] == 1
    assert evaluated == sorted(evaluated)


NORMALIZED = """
import rounds
from torch import nn
from paceline.tasks import Task

def task():
    dataset = rounds.task(8, "made").datasets(None)
    model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Task(name="normalized", model=model, datasets=lambda _: dataset, batch_size=3)
"""


def test_a_task_is_evaluated_with_the_statistics_of_the_first_worker_that_is_alive(tmp_path):
    (tmp_path / "tasks.py").write_text(NORMALIZED)
    config = pl.TrainConfig(task=f"{tmp_path}/tasks.py:task", algorithm="lockstep", epochs=2, **SPECS["momentum"])
    simulation = TaskSimulation(config, Cluster(workers=3, **CLUSTER), faults=at_step({0: 2}))
    run = simulation.run()
    own = [np.count_nonzero(rows["samples"]) for rows in run.records.values()]
    assert simulation.model is not None
    assert simulation.model[1].num_batches_tracked == own[1] > own[0] + 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kills", [{1: 2}, {0: 2}, {0: 1, 2: 3}], ids=str)
def test_replacements_take_part_with_what_the_others_have(method, kills, tmp_path):
    """A replacement comes some rounds later, and has each batch of its deal; momentum would show a wrong state."""
    config = pl.TrainConfig(
        task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm=method, epochs=8, restarts=2, **SPECS["momentum"]
    )
    cluster = Cluster(workers=3, restart_s=0.1, **CLUSTER)
    simulation = TaskSimulation(config, cluster, faults=at_step(kills))
    run, shared = simulation.run(), simulation.machine.shared
    assert (run.result["outcome"], run.result["workers_lost"], run.result["restarts"]) == (
        "stopped", sorted(kills), len(kills),
    )  # fmt: skip
    assert all((run.records[worker]["incarnation"] == 1).sum() > 3 for worker in kills)
    trained = [rows[rows["samples"] > 0] for rows in run.records.values()]
    assert sorted(np.concatenate([rows["batch"] for rows in trained])) == list(range(8 * NUM_BATCHES))
    assert shared.model_ids() == [0, 1, 2]
    model, batches = made(), [batch for epoch in shuffled(NUM_BATCHES, 8) for batch in epoch]
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for version in range(1, run.result["version"] + 1):
        own = [int(one["batch"]) for rows in trained for one in rows if one["applied_version"] == version]
        optimizer.zero_grad()
        backward(model, [batches[one] for one in own])
        optimizer.step()
    for worker in range(3):
        views = simulation.binding.views(shared.workers[worker].x)
        for one, other in zip(views, model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "kills"),
    each_value(
        [*METHODS, CODED, "local-sgd(period=3)", "da-sgd(period=3,delay=3)", "diloco(period=4,fragments=2,delay=1)"],
        [{1: 2}, {0: 2, 2: 2}, {0: 2, 1: 5}],
    ),
    ids=str,
)
def test_too_few_workers_wait_for_replacements(method, kills, tmp_path):
    """A replacement that comes long after the death lacks the step in which the worker died, and that in which it came."""
    config = pl.TrainConfig(
        task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm=method, epochs=8, restarts=2, min_workers=3
    )
    cluster = Cluster(workers=3, restart_s=100.0, **CLUSTER)
    with pytest.warns(AlgorithmWarning, match="left, fewer than min_workers=3: waiting for replacements"):
        run = TaskSimulation(config, cluster, faults=at_step(kills)).run()
    assert (run.result["outcome"], run.result["workers_lost"]) == ("stopped", sorted(kills))
    local = "period" in method
    for worker in kills:
        rows = run.records[worker]
        assert (rows["incarnation"] == 1).sum() > 3
        gap = rows["step"][rows["incarnation"] == 1].min() - rows["step"][rows["incarnation"] == 0].max(initial=0)
        assert gap <= (5 if local else 2)
    if not local:
        batches = np.concatenate([rows["batch"][rows["samples"] > 0] for rows in run.records.values()])
        assert sorted(batches) == list(range(8 * NUM_BATCHES))


@pytest.mark.parametrize("method", [*METHODS, "local-sgd(period=3)"])
def test_too_few_workers_end_if_no_replacement_comes(method, tmp_path):
    config = pl.TrainConfig(task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm=method, epochs=8, min_workers=2)
    faults = at_step({1: 2, 2: 4})
    run = TaskSimulation(config, Cluster(workers=3, **CLUSTER), faults=faults).run()
    assert run.result["outcome"] == "crashed"
    assert "Only 1 of 3 workers is left, fewer than min_workers=2, and no other" in run.result["outcome_reason"]


@pytest.mark.parametrize("method", [*METHODS, "local-sgd(period=3)"])
def test_too_few_workers_end_if_too_few_replacements_come(method, tmp_path):
    config = pl.TrainConfig(
        task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm=method, epochs=8, restarts=1, min_workers=3
    )
    run = TaskSimulation(config, Cluster(workers=3, **CLUSTER), faults=at_step({1: 2, 2: 2})).run()
    assert run.result["outcome"] == "crashed"
    assert "left, fewer than min_workers=3, and no other" in run.result["outcome_reason"]


@pytest.mark.filterwarnings("ignore:Only .* left, fewer than min_workers")
def test_workers_that_wait_look_twenty_times_a_second_at_most(tmp_path, monkeypatch):
    """Also while one replacement has been accepted and another one is on its way, a second later."""
    looks, expected = [], SimulatedNewcomers.expected

    def noting(newcomers, waited_s):
        looks.append(newcomers._scheduler.now_s)
        return expected(newcomers, waited_s)

    monkeypatch.setattr(SimulatedNewcomers, "expected", noting)
    config = pl.TrainConfig(
        task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm="all-reduce", epochs=4, restarts=2, min_workers=3
    )
    faults = at_step({1: 2}).kill(worker=2, at_s=1.0)
    run = TaskSimulation(config, Cluster(workers=3, restart_s=2.0, **CLUSTER), faults=faults).run()
    assert (run.result["outcome"], run.result["restarts"]) == ("stopped", 2)
    assert looks[-1] - looks[0] > 2.5
    assert min(np.diff(looks)) >= 0.05


@pytest.mark.filterwarnings("ignore:Only .* left, fewer than min_workers")
@pytest.mark.parametrize("method", [*METHODS, "local-sgd(period=3)"])
def test_a_replacement_that_is_killed_while_it_comes_is_replaced_before_the_next_step(method, tmp_path):
    """At any instant: as it waits, is accepted, is let in, and takes part; no step but its own lacks a worker."""
    config = pl.TrainConfig(
        task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm=method, epochs=4, restarts=3, min_workers=3
    )
    cluster = Cluster(workers=3, restart_s=0.3, **CLUSTER)
    came_s = min(TaskSimulation(config, cluster, faults=at_step({1: 2})).run().records[1]["started_s"][1:])
    for late_s in np.arange(-0.1, 0.1, 0.008):
        faults = at_step({1: 2, 2: 2}).kill(worker=1, at_s=float(came_s + late_s))
        run = TaskSimulation(config, cluster, faults=faults).run()
        assert run.result["outcome"] == "stopped", (late_s, run.result["outcome_reason"])
        batches = np.concatenate([rows["batch"][rows["samples"] > 0] for rows in run.records.values()])
        if "local" not in method:
            assert sorted(batches) == list(range(4 * NUM_BATCHES)), late_s
            per_step = [len({w for w, r in run.records.items() if v in r["applied_version"]}) for v in range(1, 6)]
            assert sum(number < 3 for number in per_step) <= 2 + run.result["records_lost"], (late_s, per_step)


@pytest.mark.parametrize(("kills", "outcome"), [({1: 16}, "stopped"), ({0: 2, 1: 2, 2: 2}, "crashed")], ids=str)
def test_a_replacement_that_nobody_can_let_in_ends(kills, outcome, tmp_path):
    """The others have ended before it starts, or have died."""
    config = pl.TrainConfig(task=task_file(tmp_path, NUM_BATCHES, "made"), algorithm="lockstep", epochs=8, restarts=3)
    cluster = Cluster(workers=3, restart_s=100.0, **CLUSTER)
    result = TaskSimulation(config, cluster, faults=at_step(kills)).run().result
    assert (result["outcome"], result["workers_lost"]) == (outcome, sorted(kills))
