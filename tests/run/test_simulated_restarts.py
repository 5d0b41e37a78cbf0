"""Killed workers of the user's own loop that are replaced in a simulation, as `launch` replaces them."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import AlgorithmWarning
from paceline.simulator import Cluster, Faults

WORKERS, EPOCHS = 3, 4
CLUSTER = Cluster(workers=WORKERS, cores=4, compute_s=0.01, detection_s=0.005, restart_s=0.02, collective="memory")
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(18)]
TOLERANT = [
    "hogwild",
    "locked",
    "leashed",
    "ad-psgd",
    "parameter-server",
    "parameter-server(shards=2)",
    "downpour(push=2)",
]
IN_ROUNDS = ["lockstep", "all-reduce", "local-sgd(period=2)", "da-sgd(period=2)", "diloco(period=4)", "d-psgd"]


class Loop:
    """Trains a linear model with Adam; keeps what each call has left in its model, in the order of their ends."""

    def __init__(self, *, epochs=EPOCHS, batches=BATCHES, own=False):
        self.epochs, self.batches, self.own = epochs, batches, own
        self.models, self.sums, self.calls = [], [], 0

    def __call__(self):
        self.calls += 1
        torch.manual_seed(self.calls)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        steps = 0
        with pl.attach(model, optimizer) as worker:
            for epoch in range(self.epochs):
                for x in worker.batches(self.batches, own=self.own):
                    optimizer.zero_grad()
                    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)
                    steps += 1
                self.sums.append((worker.worker_id, epoch, worker.sum(torch.tensor([1.0, epoch])).tolist()))
        self.models.append((worker.worker_id, {name: one.clone() for name, one in model.state_dict().items()}))
        return steps


def simulated(algorithm, *, kill_s=0.045, restarts=1, loop=None, cluster=CLUSTER, **more):
    loop = loop or Loop()
    faults = Faults().kill(worker=1, at_s=kill_s)
    return loop, pl.simulate(loop, cluster=cluster, algorithm=algorithm, faults=faults, restarts=restarts, **more)


def batches_of(run):
    return sorted(int(one) for rows in run.records.values() for one in rows["batch"] if one >= 0)


def check_sums(loop):
    """Sums are over one epoch, and the replacement takes part in the last ones."""
    assert all(total == number * epoch for _, epoch, (number, total) in loop.sums)
    assert [number for _, epoch, (number, _) in loop.sums if epoch == loop.epochs - 1] == [WORKERS] * WORKERS


@pytest.mark.parametrize("algorithm", TOLERANT)
def test_others_go_on_while_a_worker_is_replaced(algorithm):
    loop, run = simulated(algorithm)
    result, own = run.result, run.records[1]
    assert (result["outcome"], result["workers_lost"], result["restarts"]) == ("stopped", [1], 1)
    assert (loop.calls, sorted(run.returned)) == (WORKERS + 1, [0, 1, 2])
    assert own["incarnation"].tolist() == sorted(own["incarnation"])
    assert len(own[own["incarnation"] == 1]) == run.returned[1] > 0
    first_s = own["started_s"][own["incarnation"] == 1][0]
    assert first_s >= 0.045 + CLUSTER.detection_s + CLUSTER.restart_s
    batches = batches_of(run)
    assert len(batches) == len(set(batches)) == len(BATCHES) * EPOCHS - 1  # the one that it was at is lost with it
    check_sums(loop)
    again = simulated(algorithm)[1]
    assert again.result == result
    assert all((again.records[one] == run.records[one]).all() for one in range(WORKERS))


@pytest.mark.parametrize("restart_s", [0.02, 0.15])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_others_let_a_replacement_in(algorithm, restart_s):
    """In the same epoch, or in a later one, which its loop reaches without a batch."""
    cluster = replace(CLUSTER, restart_s=restart_s)
    loop, run = simulated(algorithm, cluster=cluster)
    result, own = run.result, run.records[1]
    assert (result["outcome"], result["workers_lost"], result["restarts"]) == ("stopped", [1], 1)
    assert "notes" not in result or not any("replaced" in one for one in result["notes"])
    late = own[own["incarnation"] == 1]
    assert len(late) > 0
    assert late["started_s"][0] >= 0.045 + restart_s
    batches = batches_of(run)
    if algorithm in ("lockstep", "all-reduce"):
        assert batches == list(range(len(BATCHES) * EPOCHS))
    else:  # steps since the last mean are lost, and their batches trained on again
        assert set(batches) == set(range(len(BATCHES) * EPOCHS))
    (_, first), *others = loop.models
    assert len(loop.models) == WORKERS
    for _, other in others:
        assert all(torch.equal(one, other[name]) for name, one in first.items())
    check_sums(loop)


def test_min_workers_waits_for_the_replacement():
    with pytest.warns(AlgorithmWarning, match="waiting for replacements"):
        _, run = simulated("all-reduce", min_workers=WORKERS)
    rounds = [rows[["started_s", "ended_s"]] for rows in run.records.values()]
    back_s = run.records[1]["started_s"][run.records[1]["incarnation"] == 1][0]
    begun_s = np.concatenate([rows["started_s"] for rows in rounds])
    assert not ((begun_s > 0.06) & (begun_s < back_s - 0.011)).any()
    with pytest.raises(pl.WorkerLostError, match="Only 2 of 3 workers are left, fewer than min_workers=3"):
        simulated("all-reduce", min_workers=WORKERS, restarts=0)
    with pytest.raises(pl.UsageError, match="min_workers"):
        simulated("hogwild", min_workers=2)


def test_a_replacement_that_cannot_take_part_is_left_out():
    _, run = simulated("all-reduce", loop=Loop(own=True))
    assert run.result["outcome"] == "stopped"
    assert run.result["notes"] == ["Worker 1 is not replaced: its loop does not get its batches from worker.batches."]
    assert sorted(run.returned) == [0, 2]


def test_a_replacement_that_comes_after_the_end():
    for algorithm in ("all-reduce", "d-psgd", "hogwild"):
        loop, run = simulated(algorithm, kill_s=0.235, cluster=replace(CLUSTER, restart_s=9.0))
        assert run.result["outcome"] == "stopped"
        assert (loop.calls, run.returned[1]) == (WORKERS + 1, 0)


def test_batches_of_its_own():
    """The replacement takes part in sums once it has made a step; the others wait for it there as for any worker."""
    loop, run = simulated("hogwild", loop=Loop(own=True))
    assert run.returned == dict.fromkeys(range(WORKERS), len(BATCHES) * EPOCHS)
    assert all(number in (1.0, WORKERS - 1.0, float(WORKERS)) for _, _, (number, _) in loop.sums)
    assert WORKERS in [number for worker, _, (number, _) in loop.sums if worker == 1]


def test_a_second_death_and_no_restart_left():
    faults = Faults().kill(worker=1, at_s=0.045).kill(worker=1, at_s=0.12).kill(worker=0, at_s=0.13)
    for algorithm in ("all-reduce", "hogwild"):
        run = pl.simulate(Loop(), cluster=CLUSTER, algorithm=algorithm, faults=faults, restarts=2)
        assert (run.result["workers_lost"], run.result["restarts"]) == ([0, 1, 1], 2)
        assert run.records[1]["incarnation"].max() == 2
        assert sorted(run.returned) == [1, 2]


@pytest.mark.parametrize("algorithm", ["da-sgd(period=2)", "d-psgd"])
def test_a_replacement_dies_at_any_instant_of_its_entry(algorithm):
    """Also between two steps of the others, one in which they accept it, and one in which they let it in."""
    cluster = replace(CLUSTER, detection_s=0.002, restart_s=0.005)
    for number in range(14):
        faults = Faults().kill(worker=1, at_s=0.045).kill(worker=1, at_s=0.053 + 0.0025 * number)
        run = pl.simulate(Loop(epochs=2), cluster=cluster, algorithm=algorithm, faults=faults, restarts=2)
        assert (run.result["workers_lost"], run.result["restarts"]) == ([1, 1], 2)
        assert sorted(run.returned) == [0, 1, 2]


def test_like_a_run_that_replaced_a_worker():
    run = simulated("hogwild")[1]
    again = pl.simulate(Loop(), like=run, algorithm="hogwild")
    assert (again.result["workers_lost"], again.result["restarts"]) == ([1], 1)
    with pytest.raises(pl.UsageError, match="leave out"):
        pl.simulate(Loop(), like=run, algorithm="hogwild", restarts=1)


@pytest.mark.parametrize("seed", range(16))
def test_drawn_deaths(seed):
    """Workers die at any time, also as replacements; those that end do so with the same model, and sums are over one epoch."""
    draws = random.Random(seed)
    algorithm = (TOLERANT + IN_ROUNDS)[seed % len(TOLERANT + IN_ROUNDS)]
    faults, restarts = Faults(), draws.randint(1, 3)
    for _ in range(draws.randint(1, 3)):
        faults = faults.kill(worker=draws.randrange(WORKERS), at_s=draws.uniform(0.0, 0.3))
    cluster = replace(CLUSTER, detection_s=draws.choice([0.002, 0.02]), restart_s=draws.choice([0.005, 0.03, 0.1]))
    loop = Loop()
    run = pl.simulate(loop, cluster=cluster, algorithm=algorithm, faults=faults, restarts=restarts)
    assert run.result["outcome"] == "stopped"
    assert "notes" not in run.result or not any("replaced" in one for one in run.result["notes"])
    assert all(total == number * epoch for _, epoch, (number, total) in loop.sums)
    (_, first), *others = loop.models
    assert len(loop.models) == len(run.returned)
    for _, other in others:
        assert all(torch.equal(one, other[name]) for name, one in first.items())
    assert len(batches_of(run)) >= len(BATCHES) * EPOCHS - 2 * len(run.result["workers_lost"])
