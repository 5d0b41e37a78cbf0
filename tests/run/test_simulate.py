"""The user's own loop on simulated workers."""

import sys

import pytest
import torch
from torch import nn

import paceline as pl

WORKERS = 3
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) for number in range(10)]  # not times 3


def train():
    """An epoch over BATCHES; the parameters that the model is left with."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches(BATCHES):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "local-sgd(period=2)", "d-psgd", "ad-psgd"])
def test_every_way_to_send(algorithm):
    run = pl.simulate(train, workers=WORKERS, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == 4 * len(BATCHES)
    torch.manual_seed(0)
    begun_at = nn.utils.parameters_to_vector(nn.Linear(6, 1).parameters()).detach()
    best = torch.tensor([1.0] * 6 + [0.0])
    for worker in range(WORKERS):
        assert (run.returned[worker] - best).norm() < 0.8 * (begun_at - best).norm()


def test_a_function_that_exits_in_order_has_returned():
    def exits():
        train()
        sys.exit(0)

    assert pl.simulate(exits, workers=WORKERS, algorithm="hogwild").result["samples"] == 4 * len(BATCHES)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_lockstep_leaves_every_worker_with_the_same_model(algorithm):
    cluster = pl.Cluster(workers=WORKERS).slow(worker=0, factor=10)  # the others end before it has made its last update
    run = pl.simulate(train, cluster=cluster, algorithm=algorithm)
    assert torch.equal(run.returned[0], run.returned[1])
    assert torch.equal(run.returned[0], run.returned[2])


@pytest.mark.parametrize(("given", "threads"), [({}, 1), ({"intra_op_threads": 2}, 2)])
def test_operations_use_as_many_threads_as_those_of_launched_workers(given, threads):
    seen = []

    def looks():
        seen.append(torch.get_num_threads())
        train()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pl.simulate(looks, workers=WORKERS, algorithm="lockstep", **given)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [threads] * WORKERS


def test_a_function_attaches_once():
    def twice():
        train()
        train()

    with pytest.raises(pl.UsageError, match="can attach only once"):
        pl.simulate(twice, workers=WORKERS, algorithm="ad-psgd")


def test_a_worker_that_does_not_attach_is_named():
    started = []

    def all_but_the_last():
        started.append(1)
        return train() if len(started) < WORKERS else None

    with pytest.raises(pl.PacelineError, match=r"worker 0 waits for all workers to attach.*ended already: 2"):
        pl.simulate(all_but_the_last, workers=WORKERS, algorithm="d-psgd")
