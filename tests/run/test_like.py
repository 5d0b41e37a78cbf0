"""Simulations like a recorded run: its workers' speeds, links and deaths."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paceline as pl
from paceline.cli.app import app
from paceline.records.step_record import shift_times
from paceline.run.measured_cluster import recorded_conditions
from paceline.simulator import Normal
from run.replay_task import trained, write_task

METHODS = [
    "lockstep", "all-reduce", "local-sgd(period=4)", "da-sgd", "diloco(period=8)", "d-psgd", "ad-psgd", "hogwild", "locked",
    "leashed", "parameter-server", "parameter-server(mode=async,shards=2)", "parameter-server(mode=bounded(clock_bound=3))",
    "downpour", "all-reduce(shares=auto)", "parameter-server(mode=async,codec=qsgd)",
]  # fmt: skip
CLUSTER = pl.Cluster(
    workers=4, compute_s=Normal(average_s=0.02, deviation_s=0.004), bandwidth_bytes_per_s=5e6, core_bytes_per_s=1e9
).slow(worker=1, factor=1.5)


def timed(algorithm, cluster=CLUSTER, steps=80, faults=None, **named):
    config = pl.TrainConfig(algorithm=algorithm, steps=steps, workers=cluster.workers, **named)
    return pl.simulate_task(config, cluster=cluster, faults=faults, timing_only=True, num_parameters=4810)


@pytest.mark.parametrize("algorithm", METHODS)
def test_the_same_run_takes_the_same_time(algorithm):
    run = timed(algorithm)
    again = timed(algorithm, recorded_conditions(run).cluster)
    assert again.result["wall_s"] == pytest.approx(run.result["wall_s"], rel=0.03)
    assert again.result["waiting_share"] == pytest.approx(run.result["waiting_share"], abs=0.03)


def computing_s(rows):
    return rows["gradient_ended_s"] - rows["gradient_started_s"]


def other_code_s(rows):
    """What a step takes besides, which a simulation like this run adds to the gradient's sleep."""
    own_s = rows["ended_s"] - rows["started_s"] - rows["apply_s"] - rows["wait_s"] - rows["input_s"] - computing_s(rows)
    return np.median(own_s[1:])


def test_each_gradient_takes_its_recorded_time():
    run = timed("hogwild", faults=pl.Faults().slow(worker=2, factor=5, step=30))
    again = timed("hogwild", recorded_conditions(run).cluster)
    for worker, rows in run.records.items():
        expected_s, again_s = computing_s(rows) + other_code_s(rows), computing_s(again.records[worker])
        assert np.allclose(expected_s[1:], again_s[1:], rtol=1e-9)
        assert again_s[0] == pytest.approx(np.median(expected_s[1:]))


def test_steps_without_a_gradient_and_short_batches_count_for_what_they_are():
    run = timed("hogwild", pl.Cluster(workers=2))
    rows = run.records[0] = run.records[0].copy()
    rows["samples"][10] //= 2
    rows["samples"][20] = 0
    ((_, times_s), _) = recorded_conditions(run).cluster.traces
    assert len(times_s) == 79
    assert times_s[10] == pytest.approx(2 * times_s[11])


def test_a_slow_link_is_slow():
    ((one, two, factor),) = recorded_conditions(timed("ad-psgd", CLUSTER.slow_link(1, 2, 10))).cluster.link_factors
    assert (one, two) == (1, 2)
    assert factor == pytest.approx(10, rel=0.02)


def test_a_slow_link_of_a_ring_slows_it():
    run = timed("all-reduce", CLUSTER.slow_link(1, 2, 10))
    assert timed("all-reduce", recorded_conditions(run).cluster).result["wall_s"] == pytest.approx(
        run.result["wall_s"], rel=0.01
    )


@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd", "parameter-server(mode=async)", "lockstep", "all-reduce"])
def test_the_dead_die_when_they_did(algorithm):
    cluster = dataclasses.replace(CLUSTER, collective="memory", detection_s=0.1)
    run = timed(algorithm, cluster, faults=pl.Faults().kill(worker=2, at_s=0.7))
    assert run.result["workers_lost"] == [2]
    found = recorded_conditions(run)
    again = timed(algorithm, dataclasses.replace(found.cluster, detection_s=0.1), faults=found.faults)
    assert again.result["workers_lost"] == [2]
    assert len(again.records[2]) == pytest.approx(len(run.records[2]), abs=1)
    assert again.result["steps"] == pytest.approx(run.result["steps"], abs=2)


def test_replacements_come_as_late_as_they_did():
    cluster = dataclasses.replace(CLUSTER, detection_s=0.1, restart_s=2.0)
    faults = pl.Faults().kill(worker=2, at_s=0.3).kill(worker=1, at_s=0.4)
    run = timed("hogwild", cluster, steps=300, faults=faults, restarts=1)
    found = recorded_conditions(run)
    assert found.restarts == 1
    assert [one.worker for one in found.faults.script] == [1, 2]
    assert found.cluster.detection_s + found.cluster.restart_s == pytest.approx(2.1, abs=0.05)


def test_the_times_of_deaths_count_from_the_resumption():
    run = timed("hogwild", faults=pl.Faults().kill(worker=2, at_s=0.5))
    (early,) = recorded_conditions(run).faults.script
    for rows in run.records.values():
        shift_times(rows, 100)
    run.result["resumed"] = {"checkpoint": "checkpoint/9", "events": {}, "version": 9, "versions": {}}
    (late,) = recorded_conditions(run).faults.script
    assert (late.worker, late.at_s) == (2, pytest.approx(early.at_s))
    assert early.at_s == pytest.approx(0.5, abs=0.05)


def test_a_run_that_ended_with_its_worker_does_not_go_on_in_the_simulation():
    run = timed("all-reduce", faults=pl.Faults().kill(worker=1, step=20))
    assert run.result["outcome"] == "crashed"
    conditions = recorded_conditions(run)
    assert timed("all-reduce", conditions.cluster, faults=conditions.faults).result["outcome"] == "crashed"


def loop():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches(list(torch.ones(12, 8, 4))):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    return [one.detach().clone() for one in model.parameters()]


def test_a_loop_of_ones_own_runs_on_the_recorded_workers(tmp_path):
    """With the gradients, and the same values as on a cluster that has the same times."""
    run = timed("ad-psgd", steps=40)
    run.save(tmp_path / "run")
    like = pl.simulate(loop, like=tmp_path / "run", algorithm="ad-psgd")
    other = pl.simulate(loop, cluster=recorded_conditions(run).cluster, algorithm="ad-psgd")
    assert like.result["workers"] == 4
    for worker, rows in like.records.items():
        assert np.allclose(computing_s(rows)[1:], computing_s(run.records[worker])[1 : len(rows)])
        assert all(map(torch.equal, like.returned[worker], other.returned[worker]))


def test_a_real_run_is_simulated_by_the_command(tmp_path):
    folder = trained(tmp_path / "run", write_task(tmp_path), "leashed")
    arguments = ["simulate", "--like", str(folder), "--algorithm", "leashed", "--steps", "20", "--timing-only"]
    shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "simulated")])
    assert shown.exit_code == 0, shown.output
    simulated = pl.RunData.load(tmp_path / "simulated")
    assert simulated.config["workers"] == 3
    recorded = recorded_conditions(pl.RunData.load(folder)).cluster
    assert pl.Cluster.from_table(simulated.config["cluster"], "it").traces == recorded.traces


def lose_worker(run):
    del run.records[1]


def lose_events(run):
    run.records = {worker: rows[:0] for worker, rows in run.records.items()}


def divide(run):
    run.config["layout"] = "tensor(line=4)"


def end_early(run):
    run.result = {}


def die_at_once(run):
    run.records[1]["incarnation"] = 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lose_worker, "no gradients of worker 1"),
        (lambda run: run.records[1]["samples"].fill(0), "no gradients of worker 1"),
        (lambda run: run.records[1]["samples"].fill(-1), "no gradients of worker 1"),
        (lambda run: run.records[1]["incarnation"][-1:].fill(2), "died before its first recorded step"),
        (lambda run: run.result.update(algorithm=5), "is damaged: algorithm or workers_lost"),
        (lambda run: run.result.update(workers_lost=3), "is damaged: algorithm or workers_lost"),
        (lose_events, "has no result or no events"),
        (end_early, "has no result or no events"),
        (divide, "has a layout or a plan"),
        (die_at_once, "died before its first recorded step"),
    ],
)
def test_runs_that_do_not_say_enough_are_refused(change, why):
    run = timed("hogwild", steps=5)
    run.records = {worker: rows.copy() for worker, rows in run.records.items()}
    change(run)
    with pytest.raises(pl.UsageError, match=why):
        pl.simulate(loop, like=run)


def test_what_contradicts_the_run_is_refused(tmp_path):
    faults = pl.Faults().kill(worker=2, at_s=0.1)
    run = timed("hogwild", steps=40, faults=faults, restarts=1, cluster=dataclasses.replace(CLUSTER, restart_s=0.1))
    run.save(tmp_path / "run")
    for named in ({"cluster": CLUSTER}, {"faults": faults}, {"restarts": 1}):
        with pytest.raises(pl.UsageError, match="leave out cluster, faults and restarts, or like"):
            pl.simulate(loop, like=run, **named)
    with pytest.raises(pl.UsageError, match="a run's folder or a RunData, not Cluster"):
        pl.simulate(loop, like=CLUSTER)
    with pytest.raises(pl.UsageError, match="is not the folder of a run"):
        pl.simulate(loop, like=tmp_path)
    for more in (["--workers", "2"], ["--kill", "1:3"], ["--placement", "spread"]):
        shown = CliRunner().invoke(
            app, ["simulate", "--like", str(tmp_path / "run"), *more, "--out", str(tmp_path / "x")]
        )
        assert shown.exit_code == 2
        assert "leave" in shown.output
    assert not (tmp_path / "x").exists()
