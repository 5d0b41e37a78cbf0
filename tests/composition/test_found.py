"""Combinations that were wrong once, each with what was wrong."""

import warnings

import pytest

from composition.loop import Case, simulated
from composition.methods import check

FOUND = {
    "the samples of a skipped step counted in the next gradient's weight": Case(
        "parameter-server", optimizer="momentum", samples=9, batch=2, clip=20.0, scaler=True, overflow=(0, 1), seed=58
    ),
    "a worker without a batch kept the gradients of a round that all skipped": Case(
        "all-reduce", samples=15, batch=3, scaler=True, overflow=(0, 3), rate=0.01, seed=32
    ),
    "what a codec made of parameters without a gradient was taken from its memory, and not applied": Case(
        "all-reduce(codec=sign)", samples=30, batch=1, seed=3
    ),
    "PowerSGD's next factor came from what was not applied of a matrix without a gradient": Case(
        "all-reduce(codec=power(rank=1,min_rate=1.1,warmup_steps=2))", workers=4, samples=46, batch=1
    ),
    "workers left without the update that the last goodbye makes": Case(
        "parameter-server(mode=ringleader)", samples=16, passes=2, batch=2, epochs=1
    ),
    "workers left before the servers knew of a death, which let waiting gradients make an update": Case(
        "parameter-server(mode=rennala(gradients=4))", workers=3, kill=(1, 2)
    ),
    "what a codec made of parameters without a gradient was applied as their gradient": Case(
        "parameter-server(mode=async,codec=sign)", optimizer="momentum", samples=30, batch=1, seed=3
    ),
    "the oracle left a step out for an infinite gradient that weighs nothing, as its batch is given again": Case(
        "all-reduce(codec=sign)", workers=4, samples=6, batch=1, scaler=True, overflow=(2, 2), seed=516
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_found(what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert check(FOUND[what], simulated(FOUND[what])) == "right"
