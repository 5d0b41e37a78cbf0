"""A parameter server on simulated machines: what it equals, what it bounds, and what its network costs."""

import re

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.records.summary import applied_in_order
from paceline.run.simulate_task import TaskSimulation
from paceline.simulator import Cluster, ExponentialTail, Normal
from paceline.simulator.faults import Faults

VARIED = Normal(average_s=0.001, deviation_s=0.0004)


def final(algorithm, workers, **config):
    """The run and its final parameters (P,)."""
    settings = {"algorithm": algorithm, "workers": workers, "epochs": 0.5, **config}
    simulation = TaskSimulation(pl.TrainConfig(**settings), Cluster(workers=workers))
    run = simulation.run()
    x = torch.empty(simulation.binding.num_elements)
    simulation.machine.shared.snapshot(x)
    return run, x


def timed(algorithm, workers, *, steps=100, compute_s=VARIED, parameters=1000, faults=None, **cluster):
    config = pl.TrainConfig(algorithm=algorithm, steps=steps)
    cluster = Cluster(workers=workers, compute_s=compute_s, **cluster)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=parameters, faults=faults)
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    return run


OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adamw": {"learning_rate": 0.002}, "rmsprop": {"learning_rate": 0.001}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_sync_equals_all_reduce_to_round_off(shards, optimizer):
    """90 batches of 8 in rounds of 3: the same means, applied by the user's optimizer at the server."""
    settings = {"optimizer": optimizer, **OPTIMIZERS[optimizer]}
    run, x = final(f"parameter-server(shards={shards})", 3, **settings)
    _, expected = final("all-reduce", 3, **settings)
    assert run.result["steps"] == 30
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["async", "bounded(clock_bound=2)", "sync(backups=2)"])
def test_shards_make_no_difference_to_an_elementwise_rule(mode):
    """Messages of a third of the size take less time, so times differ; with equal workers their order does not."""
    runs = [final(f"parameter-server(mode={mode}, shards={shards})", 4, optimizer="adam") for shards in (1, 3)]
    assert all(run.result["outcome"] == "stopped" for run, _ in runs)
    versions = [[shard["version"] for shard in run.result["shards"]] for run, _ in runs]
    assert set(versions[1]) == set(versions[0])
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["sync, shards=2", "async", "sync(backups=1), apply=adaptive-revision"])
def test_second_copies_make_no_difference_to_the_model_and_cost_messages(mode):
    """Equal workers: the same updates in the same order, each a little later."""
    alone, x = final(f"parameter-server(mode={mode})", 3, optimizer="adam", learning_rate=0.01)
    copied, same = final(f"parameter-server(mode={mode}, durability=replica)", 3, optimizer="adam", learning_rate=0.01)
    assert copied.result["outcome"] == "stopped", copied.result["outcome_reason"]
    assert torch.equal(x, same)
    assert copied.result["wall_s"] > alone.result["wall_s"]


def test_a_worker_dies_and_the_copies_do_not_mind():
    algorithm = "parameter-server(mode=bounded(clock_bound=1), shards=2, durability=replica)"
    run = timed(algorithm, 4, faults=Faults().kill(worker=1, at_s=0.01), detection_s=0.05)
    assert [len(rows) for worker, rows in run.records.items() if worker != 1] == [100] * 3


def test_linear_rate_is_the_rate_times_the_gradients_of_an_update():
    _, x = final("parameter-server(mode=sync(rate=linear))", 3, learning_rate=0.01)
    _, expected = final("parameter-server", 3, learning_rate=0.03)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_async_makes_every_version_once_and_in_order(workers):
    run = timed("parameter-server(mode=async)", workers, steps=50)
    applied = applied_in_order(run.records)
    assert applied["applied_version"].tolist() == list(range(1, 50 * workers + 1))
    assert (applied["read_version"] < applied["applied_version"]).all()
    assert run.result["dropped_updates"] == 0


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_staleness_in_versions_is_reported(bound):
    """One worker ten times as slow: asynchronously the others would leave it far behind."""
    workers, cluster = 5, {"slowness": ((4, 10.0),)}
    run = timed(f"parameter-server(mode=bounded(clock_bound={bound}))", workers, **cluster)
    stalest = run.result["staleness"]["max"]
    assert 0 < stalest <= (2 * bound + 1) * (workers - 1)
    ends = np.sort(np.stack([rows["ended_s"] for rows in run.records.values()]), axis=0)
    begins = np.stack([rows["gradient_started_s"] for rows in run.records.values()])
    # When anybody begins its step k + s + 1, everybody has ended step k.
    assert (begins[:, bound + 1 :].min(axis=0) >= ends[-1, : -(bound + 1)] - 2e-4 - 1e-3 * (bound == 0)).all()
    free = timed("parameter-server(mode=async)", workers, **cluster)
    assert free.result["staleness"]["max"] > stalest or bound == 3


@pytest.mark.parametrize("shards", [1, 3])
def test_backups_are_not_waited_for_and_their_gradients_are_counted_as_dropped(shards):
    """With a straggler, a step of N of N + 1 lasts as long as a fast worker's gradient."""
    spec = "parameter-server(mode=sync(backups={}), shards={})"
    slow = {"slowness": ((2, 8.0),), "compute_s": 0.001, "steps": 64}
    all_of_them = timed(spec.format(0, shards), 4, **slow)
    first_ones = timed(spec.format(1, shards), 4, **slow)
    assert all_of_them.result["dropped_updates"] == 0
    assert all_of_them.result["steps"] == 64
    dropped = [int((rows["applied_version"] == -1).sum()) for rows in first_ones.records.values()]
    assert dropped[2] > 5
    assert sum(dropped) == dropped[2] == first_ones.result["shards"][0]["dropped"]
    fast = {worker: rows["ended_s"][-1] for worker, rows in first_ones.records.items() if worker != 2}
    assert max(fast.values()) < 0.2 * all_of_them.result["wall_s"]


@pytest.mark.parametrize("shards", [1, 3])
def test_automatic_backups_drop_a_straggler_as_soon_as_it_has_shown_itself(shards):
    slow = {"slowness": ((2, 8.0),), "compute_s": 0.001, "steps": 200}
    runs = {b: timed(f"parameter-server(mode=sync(backups={b}), shards={shards})", 5, **slow) for b in ("auto", 0)}
    found = runs["auto"].result
    assert found["dropped_updates"] > 10
    assert found["gradients_per_update"]["5"] == 20, "the first choice is made after 20 steps"
    assert found["gradients_per_update"]["4"] >= 170
    assert runs[0].result["gradients_per_update"] == {"5": 200}
    fast = [rows["ended_s"][-1] for worker, rows in runs["auto"].records.items() if worker != 2]
    assert max(fast) < 0.3 * runs[0].result["wall_s"]


def test_automatic_backups_stay_off_among_equals():
    run = timed("parameter-server(mode=sync(backups=auto))", 5, compute_s=0.001)
    assert (run.result["shards"][0]["backups"], run.result["dropped_updates"]) == (0, 0)
    assert run.result["gradients_per_update"] == {"5": 100}


def test_automatic_backups_say_by_which_measure_they_are_chosen():
    (said,) = timed("parameter-server(mode=sync(backups=auto))", 3, steps=3).result["notes"]
    assert re.search(r"1 \+ 411 / N .* published for Inception; .* --half-efficient", said)
    for spec in ("parameter-server(mode=sync(backups=1))", "parameter-server"):
        assert not timed(spec, 3, steps=3).result.get("notes")


@pytest.mark.parametrize("quorum", ["global", "per-shard"])
def test_shards_choose_together_or_each_for_itself(quorum):
    run = timed(
        f"parameter-server(mode=sync(backups=1, quorum={quorum}), shards=2)",
        5,
        compute_s=ExponentialTail(least_s=1e-3, tail_s=1e-3),
    )
    shards = run.result["shards"]
    assert shards[0]["version"] == shards[1]["version"] > 80
    assert shards[0]["incomplete"] == shards[1]["incomplete"] == 0
    if quorum == "global":
        assert shards[0]["dropped"] == shards[1]["dropped"]


@pytest.mark.parametrize("mode", ["sync", "sync(backups=1), shards=2", "async", "bounded(clock_bound=1)"])
def test_a_dead_worker_is_not_waited_for(mode):
    for at_s in (0.0, 0.01, 0.0123):
        run = timed(f"parameter-server(mode={mode})", 4, faults=Faults().kill(worker=1, at_s=at_s), detection_s=0.05)
        assert run.result["workers_lost"] == [1]
        assert [len(rows) for worker, rows in run.records.items() if worker != 1] == [100] * 3


def test_death_ends_the_run_where_that_is_wished():
    config = pl.TrainConfig(algorithm="parameter-server(on_death=fail)", steps=100)
    cluster, faults = Cluster(workers=3, compute_s=VARIED), Faults().kill(worker=1, at_s=0.01)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1000, faults=faults)
    assert run.result["outcome"] == "crashed"
    assert run.result["outcome_reason"].startswith("Shard 0 of the server failed at ")
    assert "worker 1 has left" in run.result["outcome_reason"]


def test_death_ends_the_run_where_that_is_wished_though_the_others_end_before_they_hear_of_it():
    config = pl.TrainConfig(algorithm="parameter-server(mode=async, on_death=fail, shards=2)", steps=20)
    cluster, faults = Cluster(workers=3, compute_s=VARIED, detection_s=5.0), Faults().kill(worker=1, step=20)
    run = pl.simulate_task(config, cluster=cluster, timing_only=True, num_parameters=1000, faults=faults)
    assert run.result["outcome"] == "crashed"
    assert "worker 1 has left" in run.result["outcome_reason"]
    assert [len(run.records[worker]) for worker in range(3)] == [20, 19, 20]


@pytest.mark.parametrize("mode", ["sync", "sync(backups=2)", "async", "bounded(clock_bound=0)"])
def test_workers_with_unequal_data_do_not_hang(mode):
    """MXNet waits for all workers at every update, and so hangs where one has a batch less."""
    run, _ = final(f"parameter-server(mode={mode})", 7, epochs=1, partition="fixed", batch_size=205)
    assert run.result["outcome"] == "stopped"
    assert (
        run.result["samples"]
        + sum(int(rows["samples"][rows["applied_version"] == -1].sum()) for rows in run.records.values())
        == 1437
    )
    assert len({len(rows) for rows in run.records.values()}) == 2


def test_two_simulations_are_equal_bit_for_bit():
    first, second = (final("parameter-server(mode=async, shards=2)", 3)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_the_servers_network_is_the_bottleneck_and_shards_widen_it():
    """8 workers, 4 MB, 1 GB/s: a server sends and receives 8 vectors in the time of 8 gradients; k servers share that."""
    times = {}
    for shards in (1, 2, 4):
        spec = f"parameter-server(mode=async, shards={shards})"
        run = timed(spec, 8, compute_s=1e-4, parameters=1_000_000, bandwidth_bytes_per_s=1e9)
        times[shards] = run.result["wall_s"]
    assert times[1] == pytest.approx(8 * 100 * 4e6 / 1e9, rel=0.1)
    assert times[1] / times[2] > 1.8
    assert times[1] / times[4] > 3.0


@pytest.mark.parametrize("codec", ["bf16", "top-k(fraction=0.1)"])
def test_coded_gradients_train_and_are_smaller(codec):
    run, _ = final(f"parameter-server(mode=async, codec={codec}, shards=2)", 3, epochs=3)
    plain, _ = final("parameter-server(mode=async, shards=2)", 3, epochs=3)
    assert run.result["test_accuracy"] > 0.7
    assert run.result["bytes_per_step"] < 0.6 * plain.result["bytes_per_step"]


@pytest.mark.parametrize(
    "rule", ["adagrad", "adaptive-revision", "adaptive-revision(revision_state=echo)", "momentum(beta=0.5)"]
)
def test_rules_of_the_servers_own(rule):
    run, _ = final(f"parameter-server(mode=async, apply={rule}, shards=2)", 3, epochs=3, learning_rate=0.05)
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert run.result["train_loss"] < 0.5 * run.result["initial_loss"]
