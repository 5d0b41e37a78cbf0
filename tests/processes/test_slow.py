"""Workers slowed down on purpose: their own times, and the waits of others for them."""

import numpy as np
import pytest

import paceline as pl
from paceline.run.config import TrainConfig
from processes.goal_programs import Loop

FACTOR = 8


def compute_s(run, worker):
    """Median time of a worker's gradients."""
    rows = run.records[worker]
    return float(np.median(rows["gradient_ended_s"] - rows["gradient_started_s"]))


def test_a_slow_worker_of_a_task_takes_so_much_longer_for_its_gradients():
    """Each makes 20 steps: of an epoch's batches, the other may take all before this one begins."""
    run = pl.train(TrainConfig(algorithm="hogwild", workers=2, steps=20, batch_size=64, slow={1: 40}))
    assert run.result["updates_per_worker"] == [20, 20]
    assert compute_s(run, 1) > 4 * compute_s(run, 0)


def test_a_slow_worker_has_fewer_updates_and_staler_ones():
    """On a virtual clock: which of real workers begins first, and how far it comes alone, is the machine's affair."""
    config = TrainConfig(algorithm="hogwild", workers=2, epochs=2, batch_size=64)
    run = pl.simulate_task(config, cluster=pl.Cluster(workers=2).slow(worker=1, factor=40))
    fast, slow = run.result["updates_per_worker"]
    assert fast > 3 * slow > 0
    stale = {
        worker: (rows["applied_version"] - 1 - rows["read_version"]).mean() for worker, rows in run.records.items()
    }
    assert stale[1] > 3 * stale[0]


@pytest.mark.parametrize("algorithm", ["all-reduce", "lockstep"])
@pytest.mark.parametrize("kind", ["task", "loop"])
def test_others_wait_for_a_slow_worker(algorithm, kind):
    """All of its sleep comes before the others can go on, also where gradients are sent while backward still computes."""
    if kind == "task":
        settings = {"algorithm": algorithm, "workers": 2, "steps": 10, "batch_size": 256, "backend": "threads"}
        run = pl.train(TrainConfig(**settings, slow={0: 30}))
    else:
        run = pl.launch(Loop(1, evaluate=None), workers=2, algorithm=algorithm, backend="threads", slow={0: 30})
    slow, other = run.records[0], run.records[1]
    asleep_s = (slow["gradient_ended_s"] - slow["gradient_started_s"]) * 29 / 30
    rounds_s = np.diff(other["ended_s"])
    # By rounds: in one of them either worker may stand still for longer than all others take.
    assert np.median(rounds_s / asleep_s[1:]) > 0.8
    waiting_s, steps_s = other["wait_s"], other["ended_s"] - other["started_s"]
    assert np.median(waiting_s / steps_s) > 0.5
    assert run.result["waiting_share_per_worker"][1] == pytest.approx(waiting_s.sum() / steps_s.sum())


@pytest.mark.parametrize(
    ("slow", "says"),
    [({2: 10}, "slow names worker 2, but there are 2 workers"), ({0: 0.5}, "slowed by must be 1 or more")],
)
def test_factors_that_cannot_be(slow, says):
    with pytest.raises(pl.UsageError, match=says):
        pl.launch(Loop(), workers=2, slow=slow)
    with pytest.raises(pl.UsageError, match=says):
        TrainConfig(workers=2, slow=slow)


def test_a_simulation_asks_its_cluster():
    with pytest.raises(pl.UsageError, match=r"Cluster\.slow"):
        pl.simulate_task(TrainConfig(workers=2, slow={0: 2}))
