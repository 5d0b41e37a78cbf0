"""The algorithms, unchanged, on simulated workers: what they promise, and what queueing laws say about their times."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from chosen import each_value
from paceline.data.plan import BatchPlan
from paceline.records.summary import applied_in_order
from paceline.simulator import Cluster, ExponentialTail, Normal
from paceline.tasks.load import load_task

GOSSIP = ["ad-psgd", "d-psgd", "local-sgd(period=3)"]
ASYNCHRONOUS = [
    "hogwild",
    "hogwild(reads=copy)",
    "locked",
    "locked(kind=rwlock)",
    "locked(backoff=exponential)",
    "leashed",
    "leashed(persistence=1, backoff=linear)",
    "leashed(step_size=tail)",
]
VARIED = Normal(average_s=0.001, deviation_s=0.0002)


def run(algorithm, workers, *, steps=None, epochs=None, cluster=None, timing=True, parameters=1000, **config):
    cluster = cluster or Cluster(workers=workers, compute_s=VARIED)
    config = pl.TrainConfig(algorithm=algorithm, steps=steps, epochs=epochs, **config)
    return pl.simulate_task(config, cluster=cluster, timing_only=timing, num_parameters=parameters if timing else None)


def plain_loop(epochs, seed, **optimizer):
    """The user's own loop on digits: parameters and last loss."""
    task = load_task("digits-mlp")
    torch.manual_seed(seed)
    model = task.model()
    chosen = torch.optim.SGD(model.parameters(), lr=task.learning_rate, **optimizer)
    (inputs, targets), loss = task.load()[0].tensors, None
    plan = BatchPlan(num_samples=len(inputs), batch_size=task.batch_size, seed=seed)
    for number in range(plan.num_batches_for(epochs)):
        batch = plan.indices(number)
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        chosen.step()
    return task.evaluate(model, task.load()[1]), loss.item()


@pytest.mark.parametrize("algorithm", ["sequential", "lockstep", *GOSSIP, *ASYNCHRONOUS[:6]])
def test_one_worker_is_plain_training_bit_for_bit(algorithm):
    result = run(algorithm, 1, epochs=0.5, timing=False, seed=3, momentum=0.9)
    expected, last_loss = plain_loop(0.5, seed=3, momentum=0.9)
    assert result.records[0]["loss"][-1] == last_loss
    assert result.evaluations[-1]["test_loss"] == expected["loss"]


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_versions_are_made_once_each_and_in_order(algorithm, workers):
    result = run(algorithm, workers, steps=30)
    applied = applied_in_order(result.records)
    assert applied["applied_version"].tolist() == list(range(1, len(applied) + 1))
    assert len(applied) + result.result["dropped_updates"] == workers * 30
    assert (applied["read_version"] < applied["applied_version"]).all()
    assert (applied["gradient_version"] >= applied["read_version"]).all()
    assert (np.diff(applied["ended_s"]) >= 0).all()
    for rows in result.records.values():
        took_s = rows["ended_s"] - rows["started_s"]
        parts_s = rows["gradient_ended_s"] - rows["gradient_started_s"] + rows["wait_s"] + rows["apply_s"]
        assert (parts_s <= took_s + 1e-12).all()


class _Ones(nn.Module):
    """A model whose every gradient is exactly 1 in every component."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64))

    def forward(self, inputs):
        return self.w.sum() + 0.0 * inputs.sum()


@pytest.mark.parametrize("algorithm", ["lockstep", *ASYNCHRONOUS[:6]])
def test_no_update_is_lost(algorithm, monkeypatch):
    task = load_task("digits-mlp")
    planted = dataclasses.replace(task, model=_Ones, loss=lambda output, _: output, accuracy=None, learning_rate=1.0)
    monkeypatch.setattr("paceline.run.simulate_task.load_task", lambda _: planted)
    crowded = Cluster(workers=5, compute_s=ExponentialTail(least_s=1e-7, tail_s=1e-6))  # as short as an update
    result = run(algorithm, 5, steps=20, timing=False, cluster=crowded)
    updates = 20 if algorithm == "lockstep" else 100
    assert (result.result["failed_publishes"] > 20) == (algorithm == "leashed")
    assert result.result["version"] == updates
    assert result.evaluations[-1]["test_loss"] == -64.0 * updates


def test_lockstep_is_one_big_batch():
    together = run("lockstep", 4, epochs=1, timing=False, batch_size=8)
    alone = run("sequential", 1, epochs=1, timing=False, batch_size=32)
    assert together.result["steps"] == alone.result["steps"]
    assert together.evaluations[-1]["test_loss"] == pytest.approx(alone.evaluations[-1]["test_loss"], rel=1e-5)
    assert all(
        (rows["applied_version"] == together.records[0]["applied_version"]).all() for rows in together.records.values()
    )


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", *GOSSIP, *ASYNCHRONOUS])
def test_timing_only_takes_the_same_times(algorithm):
    task = load_task("digits-mlp")
    assert sum(parameter.numel() for parameter in task.model().parameters()) % 16 != 0  # padding counts in both
    full = run(algorithm, 4, steps=20, timing=False, seed=5)
    config = pl.TrainConfig(algorithm=algorithm, steps=20, seed=5)
    timed = pl.simulate_task(config, cluster=Cluster(workers=4, compute_s=VARIED), timing_only=True)
    for worker, rows in full.records.items():
        for name in rows.dtype.names:
            if name != "loss":
                assert (rows[name] == timed.records[worker][name]).all(), name


def test_persistence_bounds_what_is_added_after_the_gradient():
    cluster = Cluster(workers=16, compute_s=ExponentialTail(least_s=1e-4, tail_s=1e-4))
    strict = run("leashed(persistence=0)", 16, steps=100, cluster=cluster, parameters=20_000).result
    assert strict["staleness"]["mean_after_gradient"] == 0
    assert strict["dropped_updates"] > 0
    loose = run("leashed(persistence=2)", 16, steps=100, cluster=cluster, parameters=20_000)
    assert max(rows["failed_publishes"].max() for rows in loose.records.values()) == 3  # the third loss drops it
    assert run("leashed", 16, steps=100, cluster=cluster, parameters=20_000).result["dropped_updates"] == 0


@pytest.mark.parametrize("algorithm", ["hogwild", "leashed", "locked(kind=rwlock)"])
@pytest.mark.parametrize("workers", [2, 5, 16])
def test_staleness_is_the_number_of_the_others(algorithm, workers):
    result = run(algorithm, workers, steps=400, parameters=100).result
    assert result["staleness"]["mean"] == pytest.approx(workers - 1, rel=0.03, abs=0.05)


@pytest.mark.parametrize(("workers", "ratio"), [(4, 4.0), (16, 9.0), (32, 9.0)])
def test_number_of_workers_in_the_retry_loop(workers, ratio):
    """n* = m / (T_c / T_u + 1): exact by Little's law where each attempt ends the step (persistence 0)."""
    parameters = 250_000  # 1 MB: an attempt reads the newest vector and the gradient, and writes a new one
    attempt_s = 3 * 4 * parameters / 10e9 + 4 * 100e-9
    compute = ExponentialTail(least_s=ratio * attempt_s / 2, tail_s=ratio * attempt_s / 2)
    cluster = Cluster(workers=workers, compute_s=compute, bus_bytes_per_s=1e15)
    result = run("leashed(persistence=0)", workers, steps=300, cluster=cluster, parameters=parameters)
    rows = np.concatenate(list(result.records.values()))
    in_loop = (rows["ended_s"] - rows["gradient_ended_s"]).sum() / (rows["ended_s"] - rows["started_s"]).sum() * workers
    assert in_loop == pytest.approx(workers / (ratio + 1), rel=0.03)
    # Without a bound a lost race costs further attempts: the law is a lower bound, and close where races are rare.
    free = run("leashed", workers, steps=300, cluster=cluster, parameters=parameters)
    rows = np.concatenate(list(free.records.values()))
    free_loop = (
        (rows["ended_s"] - rows["gradient_ended_s"]).sum() / (rows["ended_s"] - rows["started_s"]).sum() * workers
    )
    assert free_loop > in_loop


@pytest.mark.parametrize(("algorithm", "slow"), each_value(["hogwild", "leashed", "locked"], [(8, 100), (4, 10)]))
def test_a_slow_worker_costs_its_share_only(algorithm, slow):
    """Time for the same number of samples: P / (P - 1 + 1/f) of the undisturbed time, by the counter of batches."""
    workers, factor = slow
    cluster = Cluster(workers=workers, compute_s=VARIED)
    epochs, batch = 120, {"batch_size": 8}
    config = pl.TrainConfig(algorithm=algorithm, epochs=epochs, **batch)
    times = [
        pl.simulate_task(config, cluster=one, timing_only=True, num_parameters=1000).result["wall_s"]
        for one in (cluster, cluster.slow(worker=0, factor=factor))
    ]
    # The slow worker's last step may end up to `factor` steps after all others.
    last_s = factor * 0.001 * 1.3
    ideal = workers / (workers - 1 + 1 / factor)
    assert ideal * 0.98 <= times[1] / times[0] <= ideal * 1.02 + last_s / times[0]


def test_a_slow_worker_slows_lockstep_as_much_as_itself():
    cluster = Cluster(workers=8)
    times = [
        run("lockstep", 8, steps=20, cluster=one).result["wall_s"]
        for one in (cluster, cluster.slow(worker=3, factor=100))
    ]
    assert times[1] / times[0] == pytest.approx(100, rel=0.01)


def test_bad_configurations_are_refused():
    for config, options, says in [
        ({"algorithm": "sequential"}, {}, "runs with 1 worker"),
        ({"optimizer_state": "shared"}, {}, "do not support"),
        ({"target_loss": 0.1}, {"timing_only": True}, "leave out the target"),
        ({}, {"num_parameters": 5}, "--timing-only"),
    ]:
        with pytest.raises(pl.UsageError, match=says):
            pl.simulate_task(pl.TrainConfig(workers=2, **config), **options)


def test_target_ends_the_run():
    result = run("hogwild", 4, epochs=20, timing=False, target_loss=1.5).result
    assert result["outcome"] == "converged"
    assert result["wall_s"] == pytest.approx(result["time_to_target_s"], rel=0.01)


def test_divergence_names_the_worker():
    result = run("hogwild", 4, epochs=2, timing=False, learning_rate=1e30).result
    assert result["outcome"] == "diverged"
    assert "Worker" in result["outcome_reason"]
