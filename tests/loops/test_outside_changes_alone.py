"""What a lone worker's loop does to its parameters outside the step is as in plain PyTorch, bit for bit."""

from functools import cache

import pytest
import torch

import paceline as pl
from loops import families
from loops.changes import CHANGES, PLACES, nothing, swap, trained
from loops.habits import plain_attach

PLAIN_ALONE = [None, *(one for one in families.ALL if one not in families.OWN_RULE)]


@cache
def plainly(change, place, uses_batches):
    return trained(plain_attach, change, place, uses_batches=uses_batches)


KINDS_ALONE = [None, "hogwild(reads=copy)", "all-reduce", "locked"]  # of where a lone worker's parameters are


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("algorithm", "uses_batches"), [(one, True) for one in PLAIN_ALONE] + [(one, False) for one in KINDS_ALONE]
)
def test_alone_it_is_plain_pytorch_bit_for_bit(algorithm, place, uses_batches):
    for change in [*CHANGES, swap]:
        plain = plainly(change, place, uses_batches)
        ours = trained(
            lambda model, optimizer: pl.attach(model, optimizer, algorithm), change, place, uses_batches=uses_batches
        )
        assert torch.equal(ours, plain), change


@pytest.mark.parametrize("uses_batches", [True, False], ids=["batches", "own batches"])
@pytest.mark.parametrize("place", ["top", "backward", "step"])
@pytest.mark.parametrize("algorithm", KINDS_ALONE)
def test_alone_what_happens_once_after_many_steps_lasts(algorithm, place, uses_batches):
    """A lone worker's vector is not looked at anew in every step; what `load_state_dict` has put in it makes no difference."""
    for change in CHANGES:
        for loads_before in (False, True):
            plain, unchanged = (once_plainly(one, loads_before, place, uses_batches) for one in (change, nothing))
            ours = trained(
                lambda model, optimizer: pl.attach(model, optimizer, algorithm),
                once(change, loads_before),
                place,
                uses_batches=uses_batches,
            )
            assert torch.equal(ours, plain), change
            assert not torch.equal(plain, unchanged), change


def once(change, loads_before):
    calls = 0

    def changed(model):
        nonlocal calls
        calls += 1
        if calls == 3 and loads_before:
            swap(model)
        if calls == 5:
            change(model)

    return changed


@cache
def once_plainly(change, loads_before, place, uses_batches):
    return trained(plain_attach, once(change, loads_before), place, uses_batches=uses_batches)
