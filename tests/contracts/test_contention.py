"""Many workers on one vector: what leashed drops, retries and never adds; Adam's shared step."""

import numpy as np
import pytest

import paceline as pl
from contracts.programs import NUM_BATCHES, AddUp
from contracts.runs import run_function, run_task
from contracts.table import ROWS, rows

# A tiny gradient and half a million parameters to copy: four workers are nearly always in the retry loop.
SIZE, EPOCHS = 500_000, 6


@pytest.fixture(scope="module")
def contended(tmp_path_factory):
    runs = {}

    def run(algorithm):
        if algorithm not in runs:
            train = AddUp(SIZE, epochs=EPOCHS, meeting=tmp_path_factory.mktemp("meeting"))
            runs[algorithm] = run_function(train, workers=4, algorithm=algorithm)[0]
        return runs[algorithm]

    return run


def test_persistence_0_adds_no_staleness_after_the_gradient_and_drops(contended):
    result = contended(pl.Leashed(persistence=0)).result
    assert result["staleness"]["mean_after_gradient"] == 0
    assert result["dropped_updates"] > 0
    assert result["failed_publishes"] == result["dropped_updates"]
    assert (
        sum(result["updates_per_worker"]) + result["dropped_updates"] == result["computed_gradients"] == 6 * NUM_BATCHES
    )


def test_persistence_none_drops_nothing(contended):
    result = contended(pl.Leashed()).result
    assert result["dropped_updates"] == 0
    assert result["failed_publishes"] > 0
    assert result["steps"] == 6 * NUM_BATCHES
    assert result["staleness"]["mean_after_gradient"] > 0


def test_persistence_1_gives_up_after_the_second_failure(contended):
    run = contended(pl.Leashed(persistence=1))
    records = np.concatenate(list(run.records.values()))
    dropped = records["applied_version"] == -1
    assert set(records["failed_publishes"][dropped]) <= {2}
    assert records["failed_publishes"][~dropped].max() <= 1


def test_at_most_3m_vectors(contended):
    """m gradients are counted in; the pool itself may then touch 2m, the evaluator's one included."""
    assert contended(pl.Leashed()).result["vectors_touched"] <= 2 * 4 + 1


@rows(lambda row: isinstance(row.algorithm, pl.Locked) and not row.scales_stale_updates)
def test_adams_shared_step_counts_every_update(row):
    from paceline.run.train import TrainConfig, prepared

    config = TrainConfig(
        algorithm=row.spec, workers=2, epochs=1, optimizer="adam", learning_rate=0.002, optimizer_state="shared"
    )
    training = prepared(config)
    run = training.run()
    assert training.supervisor.arena.extra("state 0 step").item() == run.result["version"] == 180


@rows()
def test_small_tasks_run_with_any_number_of_workers(row):
    """Also more workers than batches: 3 batches, 5 workers. Other contracts have 2 and 3."""
    for workers in row.workers([1, 5]):
        run, _ = run_task(row, workers=workers, backend="threads", epochs=1, batch_size=479)
        assert run.result["samples"] + 479 * run.result["dropped_updates"] == 1437
        assert run.result["outcome"] == "stopped"


def test_every_algorithm_is_in_the_table_with_every_kind_of_argument():
    assert len({row.spec for row in ROWS}) == len(ROWS)
    used = "\n".join(row.spec for row in ROWS)
    for word in ("rwlock", "backoff=constant", "backoff=linear", "backoff=exponential", "step_size=inverse"):
        assert word in used
    for word in ("step_size=exponential", "step_size=tail", "persistence=0", "persistence=1", "reads=copy"):
        assert word in used
