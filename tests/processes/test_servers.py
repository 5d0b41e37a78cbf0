"""A parameter server in real processes: shards and workers that die, data that run out, and an exact account of all of it."""

import os
import random
import signal
from unittest import mock

import pytest
import torch

import paceline as pl
from paceline.training import _Training
from processes.drill import Drill
from processes.shards import check_reported_losses, run_and_kill_shards


@pytest.mark.parametrize("round_number", range(3))
@pytest.mark.parametrize("snapshot_s", [0.0, 0.05])
def test_a_shard_is_killed_and_every_update_is_accounted_for(round_number, snapshot_s):
    """Gradients are integers: what the parameters hold is what was applied, less what is reported as lost; nothing twice."""
    at = random.Random(f"{round_number} {snapshot_s}").randrange(20, 300)
    algorithm = pl.ParameterServer(mode="async", snapshot_s=snapshot_s)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(0, at), (0, at + 300)])
    check_reported_losses(run, parameters, restarts=2)


def test_a_shard_of_several_is_killed_in_sync():
    algorithm = pl.ParameterServer(shards=2, snapshot_s=0.0)
    run, parameters = run_and_kill_shards(algorithm, kill_at=[(1, 100), (0, 250)])
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

    config = pl.TrainConfig(algorithm="parameter-server(backups=1)", workers=3, epochs=10_000)
    training = _Training(config, None, None, "", look)
    with mock.patch("paceline.training._PROGRESS_EVERY_S", 0.0):
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
