"""What the records of several workers say agrees with itself, with the version and with the data."""

import numpy as np
import pytest

import paceline as pl
from contracts.linear_task import LINEAR
from contracts.runs import run_task
from contracts.table import backends, rows

EPOCHS, BATCH_SIZE, BATCHES = 2, 9, 160  # three workers divide neither an epoch's batches nor the run's


def all_records(run):
    return np.concatenate(list(run.records.values()))


@pytest.fixture(scope="module")
def trained():
    """Three workers of each row, trained once for all tests of this file."""
    runs = {}

    def run(row, backend):
        if (row.spec, backend) not in runs:
            workers = row.most(3)
            settings = {"task": LINEAR, "workers": workers, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
            runs[row.spec, backend] = workers, *run_task(row, backend=backend, **settings)
        return runs[row.spec, backend]

    return run


@backends(lambda row: row.algorithm.gossip and not row.drops_updates)
def test_every_worker_counts_its_own_versions(row, backend, trained):
    """An update of a worker's own model is a gradient or, where the averages are made beside the training, an average."""
    _, run, _ = trained(row, backend)
    for own in run.records.values():
        made = own["applied_version"][own["samples"] > 0]
        assert (np.diff(made) >= 1).all()
        assert (own["applied_version"][own["samples"] == 0] == 0).all()
        between = made[-1] - len(made) if len(made) else 0  # the others may take all batches before one begins
        assert between <= own["averages"].sum() if not row.algorithm.lockstep else between == (len(own) > len(made))
    assert run.result["steps"] == sum(run.result["updates_per_worker"]) == EPOCHS * BATCHES
    assert sum(run.result["share_of_updates"]) == pytest.approx(1.0)
    assert run.result["averages_per_step"] > 0 or not row.algorithm.lockstep
    assert run.result["consensus_distance"] >= 0
    assert run.result["worst_worker_accuracy"] > 0.6  # an untrained one has 0.1


@backends(lambda row: not row.algorithm.gossip)
def test_every_version_occurs_exactly_once(row, backend, trained):
    workers, run, parameters = trained(row, backend)
    versions = all_records(run)["applied_version"]
    counts = dict(zip(*np.unique(versions[versions > 0], return_counts=True), strict=True))
    assert list(counts) == list(range(1, parameters.version + 1))
    if row.together and row.served:
        assert counts.pop(parameters.version) in range(1, workers + 1)  # the last has what is left
    present = workers if row.together else 1
    assert (row.drops_updates and row.together) or row.accrues or set(counts.values()) == {present}
    assert not row.accrues or max(counts.values()) > 1
    assert run.result["version"] == run.result["steps"] == parameters.version


@backends()
def test_every_gradient_is_applied_or_dropped(row, backend, trained):
    workers, run, _ = trained(row, backend)
    result, records = run.result, all_records(run)
    made = EPOCHS * row.batches(BATCHES, workers)
    assert result["computed_gradients"] == np.count_nonzero(records["samples"]) == made
    without = np.count_nonzero((records["samples"] == 0) & (records["applied_version"] > 0))  # the others' update
    assert result["computed_gradients"] + without == sum(result["updates_per_worker"]) + result["dropped_updates"]
    assert without == 0 or (row.together and row.algorithm.lockstep)
    assert row.drops_updates or result["dropped_updates"] == 0
    assert result["events_lost"] == 0
    assert result["outcome"] == "stopped"
    assert result["workers_lost"] == []


@backends()
def test_every_sample_is_trained_on_once_an_epoch(row, backend, trained):
    workers, run, _ = trained(row, backend)
    records = all_records(run)
    batches = records["batch"][records["samples"] > 0]
    assert sorted(batches) == list(range(EPOCHS * row.batches(BATCHES, workers)))
    assert records["samples"].sum() == EPOCHS * 1437


@backends()
def test_staleness_agrees_with_its_histogram(row, backend, trained):
    _, run, _ = trained(row, backend)
    staleness = run.result["staleness"]
    histogram = {int(value): count for value, count in staleness["histogram"].items()}
    assert min(histogram) >= 0
    assert sum(histogram.values()) == sum(run.result["updates_per_worker"])
    mean = sum(value * count for value, count in histogram.items()) / sum(histogram.values())
    assert staleness["mean"] == pytest.approx(mean)
    assert staleness["max"] == max(histogram)
    assert 0 <= staleness["mean_after_gradient"] <= staleness["mean"]
    if row.algorithm.max_workers == 1 or row.algorithm.lockstep or row.together:
        assert histogram.keys() == {0}


@backends()
def test_times_of_a_step_are_in_order(row, backend, trained):
    _, run, _ = trained(row, backend)
    for own in run.records.values():
        assert (own["started_s"] <= own["gradient_started_s"]).all()
        assert (own["gradient_started_s"] <= own["gradient_ended_s"]).all()
        assert (own["gradient_ended_s"] <= own["ended_s"]).all()
        assert (own["ended_s"][:-1] <= own["started_s"][1:]).all()
        assert (own["started_s"] >= 0).all()
        assert (own["wait_s"] + own["apply_s"] <= own["ended_s"] - own["started_s"] + 1e-6).all()


def check_learnt(run):
    """The loss is convex: it falls whatever the order and the staleness of updates, half of which may be dropped."""
    assert run.result["test_accuracy"] > 0.6
    assert run.result["test_loss"] < 0.75 * run.result["initial_loss"]


@backends(lambda row: not row.learning_follows_times)
def test_learns(row, backend, trained):
    _, run, _ = trained(row, backend)
    check_learnt(run)


@rows(lambda row: row.learning_follows_times)
def test_learns_where_times_are_known(row):
    config = pl.TrainConfig(task=LINEAR, algorithm=row.spec, epochs=EPOCHS, batch_size=BATCH_SIZE)
    check_learnt(pl.simulate_task(config, cluster=pl.Cluster(workers=3).slow(worker=1, factor=4)))
