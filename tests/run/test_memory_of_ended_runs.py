"""What a run has held is free when it ends, without a garbage collection."""

import gc
import weakref

import pytest
import torch
from torch import nn

import paceline as pl

ALGORITHMS = [
    "hogwild",
    "leashed",
    "all-reduce",
    "lockstep",
    "parameter-server",
    "d-psgd",
    "ad-psgd",
    "diloco(period=2)",
]


def simulated(train, algorithm):
    pl.simulate(train, workers=2, algorithm=algorithm)


def in_threads(train, algorithm):
    pl.launch(train, workers=2, algorithm=algorithm, backend="threads")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("run", [simulated, in_threads])
def test_models_and_vectors_are_freed(run, algorithm):
    models = []

    def train():
        model = nn.Linear(4, 1)
        models.append(weakref.ref(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(list(torch.ones(8, 2, 4))):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                worker.report(loss)
            worker.mean(1.0)

    run(train, algorithm)  # the first one loads modules, which leave garbage of their own
    gc.collect()
    gc.disable()
    try:
        run(train, algorithm)
        assert [model() for model in models] == [None] * 4
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
