"""A parameter server in real processes: shards and workers that die, data that run out, and an exact account of all of it."""

import os
import random
import signal

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.algorithms.server.user import UserOptimizer
from paceline.memory.failpoints import ENVIRONMENT_VARIABLE
from paceline.run.train import prepared
from processes.drill import Drill
from processes.shards import check_reported_losses, run_and_kill_shards


@pytest.mark.parametrize("snapshot_s", [0.0, 0.05])
def test_a_shard_is_killed_and_every_update_is_accounted_for(snapshot_s):
    """Gradients are integers: what the parameters hold is what was applied, less what is reported as lost; nothing twice.

    `make soak` does so 25 times each.
    """
    at = random.Random(f"0 {snapshot_s}").randrange(20, 300)
    algorithm = pl.ParameterServer(mode=pl.Async(), snapshot_s=snapshot_s)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, at), (0, at + 300)])
    check_reported_losses(run, parameters, restarts=2)


def test_a_shard_of_several_is_killed_in_sync():
    algorithm = pl.ParameterServer(shards=2, snapshot_s=0.0)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 50), (0, 125)])
    assert (run.result["outcome"], run.result["server_restarts"]) == ("stopped", 2)
    assert [shard["version"] for shard in run.result["shards"]] == [parameters.version] * 2
    assert torch.isfinite(parameters.x).all()


def test_a_stopped_straggler_is_dropped_and_goes_on():
    """SIGSTOP: the others make their steps without it; woken up, its late gradient is refused and the next one counts."""
    stopped, seen = {}, {}

    def look(progress):
        worker = training.supervisor.workers[2].handle.pid
        if "at" not in stopped and progress.version > 50:
            stopped["at"] = progress.version
            os.kill(worker, signal.SIGSTOP)
        elif "at" in stopped and "woken" not in stopped and progress.version > stopped["at"] + 200:
            stopped["woken"] = progress.version
            seen["steps"] = progress.workers[2].steps
            os.kill(worker, signal.SIGCONT)
        elif "woken" in stopped and progress.workers[2].steps > seen["steps"] + 10:
            training.supervisor.stop()

    config = pl.TrainConfig(algorithm="parameter-server(mode=sync(backups=1))", workers=3, epochs=10_000)
    training = prepared(config, on_progress=look, progress_every_s=0.0)
    result = training.run().result
    assert result["outcome"] == "stopped"
    assert result["dropped_updates"] > 0
    assert result["updates_per_worker"][2] > 0
    assert result["workers_lost"] == []


@pytest.mark.parametrize("method", ["parameter-server", "parameter-server(mode=async, shards=2)"])
def test_a_dead_worker_is_replaced_and_gets_the_current_parameters(method):
    drill = Drill(method, kill={1: 60}, restarts=1)
    drill.until = lambda progress: drill.is_back(1) and progress.version > 500
    run = drill.run()
    assert (run.result["outcome"], run.result["restarts"]) == ("stopped", 1)
    second = run.records[1][run.records[1]["incarnation"] == 1]
    assert second["read_version"].min() > 60
    assert second["loss"].mean() < 0.6 * run.result["initial_loss"]


def test_workers_with_unequal_data_do_not_hang():
    """7 parts of 206 or 205 samples in batches of 205: two batches for some, one for the others."""
    config = pl.TrainConfig(
        algorithm="parameter-server(shards=2)", workers=7, epochs=2, partition="fixed", batch_size=205
    )
    result = pl.train(config).result
    assert (result["outcome"], result["samples"]) == ("stopped", 2 * 1437)
    assert [shard["version"] for shard in result["shards"]] == [4, 4]


def gradients_by_version(run):
    """How many gradients made each version, as recorded: index 0 is version 1."""
    versions = np.concatenate(list(run.records.values()))["applied_version"]
    return np.bincount(versions[versions > 0])[1:]


def last_version(run, worker):
    return int(run.records[worker]["applied_version"].max())


def test_a_step_waits_for_a_dead_workers_successor_where_that_is_wished():
    """No update is made of two gradients while the third worker is being replaced; one may lack a record that died."""
    drill = Drill("parameter-server(on_death=wait, shards=2)", kill={1: 60}, restarts=1)
    drill.until = lambda progress: drill.is_back(1) and progress.version > 300
    run = drill.run()
    assert (run.result["outcome"], run.result["restarts"]) == ("stopped", 1)
    incarnations = run.records[1]["incarnation"]
    assert (incarnations == 0).sum() > 60
    assert (incarnations == 1).sum() > 0
    made_of = gradients_by_version(run)[:-2]  # at the end, workers stop within a step
    assert set(made_of) <= {2, 3}
    assert (made_of == 2).sum() <= 1


def test_backups_die_at_full_quorum_and_beyond_that_the_quorum_shrinks():
    """Four workers, of which two make a step: two deaths change nothing; after the third, one goes on alone."""
    drill = Drill("parameter-server(mode=sync(backups=2))", workers=4, kill={1: 40, 3: 80, 2: 300}, apart=200)
    run = drill.run()
    assert (run.result["outcome"], sorted(run.result["workers_lost"])) == ("stopped", [1, 2, 3])
    made_of = gradients_by_version(run)
    first, second, third = sorted(last_version(run, worker) for worker in (1, 2, 3))
    short = 1 + np.flatnonzero(made_of[:third] != 2)  # applied, and its record died with the worker
    assert third - second > 100
    assert len(short) <= 2, "one for each of the first two deaths"
    assert (short > first).all()
    assert set(made_of[short - 1]) <= {1}
    assert set(made_of[third + 1 :]) == {1}
    assert len(made_of) > third + 100


def test_death_ends_the_run_where_that_is_wished():
    result = Drill("parameter-server(mode=sync(backups=1), on_death=fail)", kill={1: 40}).run().result
    assert result["outcome"] == "crashed"
    assert "worker 1 has left" in result["outcome_reason"]


def test_the_worker_that_makes_the_warm_start_dies_and_the_next_one_goes_on(monkeypatch):
    """By itself, at its hundredth step: a supervisor that is waiting for a core would kill it after the warm start."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "ring.unwritten@0#100")
    drill = Drill("downpour(warm_start_steps=300)")
    drill.killed_at[0] = 0  # the run is stopped only after this worker was lost
    run = drill.run()
    assert (run.result["outcome"], run.result["workers_lost"]) == ("stopped", [0])
    died = last_version(run, 0)
    assert died <= 100
    assert died <= run.records[1]["read_version"].min() <= died + 1
    assert run.records[2]["read_version"].min() >= 300
    alone = run.records[1][run.records[1]["applied_version"] <= 300]
    assert (alone["applied_version"] - alone["read_version"] == 1).all()


@pytest.mark.parametrize("round_number", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_shard_of_downpour_is_killed_and_accrued_gradients_are_accounted_for(round_number):
    """Fetch and push in rhythms of their own; what the parameters hold is what was applied, less what is reported as lost."""
    at = random.Random(f"downpour {round_number}").randrange(20, 300)
    algorithm = pl.Downpour(fetch=2, push=3, apply=UserOptimizer(), snapshot_s=0.0)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, at), (0, at + 150)])
    check_reported_losses(run, parameters, restarts=2, push=3)
