"""Killed workers that are replaced: when, with which model and which batches, and what the others do meanwhile."""

import json

import pytest
import torch
from typer.testing import CliRunner

import paceline as pl
from paceline.algorithms.topology import Complete, Ring
from paceline.cli.app import app
from paceline.simulator import Cluster, ExponentialTail, Faults
from simulator.programs import drive

STEPS = 12
DETECTION_S, RESTART_S = 0.02, 0.03
TOLERANT = [
    "hogwild",
    "locked",
    "leashed",
    "ad-psgd",
    "parameter-server",
    "parameter-server(mode=async)",
    "downpour",
    "adaptive-revision",
]


def run(algorithm, faults, *, restarts=1, workers=4, timing=True, **more):
    config = pl.TrainConfig(task="digits-mlp", algorithm=algorithm, workers=workers, restarts=restarts, **more)
    cluster = Cluster(workers=workers, detection_s=DETECTION_S, restart_s=RESTART_S)
    return pl.simulate_task(config, cluster=cluster, timing_only=timing, faults=faults)


@pytest.mark.parametrize("algorithm", TOLERANT)
def test_a_successor_makes_the_steps_that_the_dead_one_has_left(algorithm):
    at_s = 0.025  # in its third step
    ended = run(algorithm, Faults().kill(worker=1, at_s=at_s), steps=STEPS)
    assert (ended.result["outcome"], ended.result["restarts"], ended.result["workers_lost"]) == ("stopped", 1, [1])
    own = ended.records[1]
    assert own["incarnation"].tolist() == [0] * 2 + [1] * (STEPS - 2)
    assert own["step"].tolist() == [1, 2, *range(1, STEPS - 1)]
    assert own["started_s"][2] == pytest.approx(at_s + DETECTION_S + RESTART_S, abs=2e-3)  # and a model's transfer
    assert own["started_s"][2] >= at_s + DETECTION_S + RESTART_S
    assert ended.result["share_of_updates"] == [0.25] * 4


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("kind", ["mutex", "rwlock"])
def test_a_worker_that_is_killed_while_it_waits_for_the_lock_is_not_handed_it(kind, restarts):
    cluster = Cluster(
        workers=4, compute_s=0.001, core_bytes_per_s=1e8
    )  # most of a step is moving vectors, one at a time
    config = pl.TrainConfig(algorithm=f"locked(kind={kind})", workers=4, steps=STEPS, batch_size=16, restarts=restarts)
    for part in range(5):
        faults = Faults().kill(worker=1, at_s=0.011 + 0.0013 * part)
        ended = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=20_000, faults=faults)
        assert (ended.result["outcome"], ended.result["workers_lost"]) == ("stopped", [1])


def test_a_run_with_gradients_is_the_same_each_time_and_a_death_costs_one_batch():
    first, again = (run("ad-psgd", Faults().kill(worker=2, step=5), timing=False, epochs=1, seed=3) for _ in range(2))
    assert first.result == again.result
    assert all((first.records[one] == again.records[one]).all() for one in range(4))
    batches = sorted(int(one) for rows in first.records.values() for one in rows["batch"])
    assert len(batches) == len(set(batches)) == batches[-1]  # of the numbers from 0 on, one is missing
    assert first.records[2]["incarnation"].max() == 1


def test_deaths_beyond_the_restarts_are_final():
    faults = Faults().kill(worker=1, at_s=0.025).kill(worker=1, at_s=0.1).kill(worker=0, at_s=0.105)
    ended = run("ad-psgd", faults, restarts=2, steps=STEPS)
    assert (ended.result["restarts"], ended.result["workers_lost"]) == (2, [0, 1, 1])
    assert set(ended.records[1]["incarnation"]) == {0, 1, 2}
    assert set(ended.records[0]["incarnation"]) == {0}
    assert len(ended.records[0]) < STEPS == len(ended.records[1])


def test_a_run_waits_for_successors_even_if_nobody_else_is_left():
    faults = Faults().kill(worker=0, at_s=0.025).kill(worker=1, at_s=0.025)
    ended = run("hogwild", faults, workers=2, restarts=2, steps=STEPS)
    assert ended.result["updates_per_worker"] == [STEPS, STEPS]


def test_the_command_line(tmp_path):
    words = "simulate --algorithm hogwild --workers 2 --steps 4 --timing-only --kill 1:2 --restarts 1 --json --out"
    done = CliRunner().invoke(app, [*words.split(), str(tmp_path / "run")])
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["workers_lost"], result["restarts"], result["updates_per_worker"]) == ([1], 1, [4, 4])


def test_lockstep_ends_as_it_does_in_a_real_run():
    ended = run("d-psgd", Faults().kill(worker=1, step=3), steps=STEPS)
    assert (ended.result["outcome"], ended.result["restarts"]) == ("crashed", 0)
    assert "worker 1" in ended.result["outcome_reason"]


@pytest.mark.parametrize(("topology", "workers"), [(Ring(), 4), (Ring(), 5), (Complete(), 3)])
def test_a_late_joiner_takes_a_neighbours_model_and_the_mean_stays(topology, workers, monkeypatch):
    x0 = torch.randn(workers, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cluster = Cluster(
        workers=workers,
        compute_s=ExponentialTail(least_s=0.002, tail_s=0.008),
        detection_s=DETECTION_S,
        restart_s=0.5,
    )
    means = []
    take_model = pl.algorithms.pairwise.PairwiseAveraging.take_model

    def spoilt(averaging):
        """By now the others agree; what the dead one has left is nonsense."""
        averaging._x.fill_(1e6)
        others = [one for number, one in enumerate(ended.shared.workers) if number != 1]
        means.append(sum(one.x for one in others) / len(others))
        take_model(averaging)

    monkeypatch.setattr(pl.algorithms.pairwise.PairwiseAveraging, "take_model", spoilt)
    faults = Faults().kill(worker=1, at_s=0.3)
    options = {"num_steps": 150, "x0": x0, "faults": faults, "restarts": 1}
    driven = drive(pl.ADPSGD(topology=topology), cluster, run=False, **options)
    ended = driven.machine
    ended.scheduler.run()
    assert len(means) == 1
    assert len(driven.ports) == workers + 1  # and a successor's
    assert driven.ports[-1].counts.averages > 40  # it takes part
    assert (torch.stack([one.x for one in ended.shared.workers]) - means[0]).abs().max() < 1e-9
