"""Combinations that were wrong once, each with what was wrong."""

import warnings

import pytest

from composition.loop import Case, simulated
from composition.methods import check

FOUND = {
    "the samples of a skipped step counted in the next gradient's weight": Case(
        "parameter-server", optimizer="momentum", samples=9, batch=2, clip=20.0, scaler=True, overflow=(0, 1), seed=58
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_found(what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert check(FOUND[what], simulated(FOUND[what])) == "right"
