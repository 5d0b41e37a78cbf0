"""Drawn models, cut at drawn places, train in parts as they do by themselves."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from model_parallel.drawn import WIDTH, Drawn, Operation, operations
from model_parallel.in_memory import compare
from model_parallel.models import BATCH
from paceline.model_parallel.graph.coarsen import blocks_of
from paceline.model_parallel.graph.trace import trace


def batches(dtype):
    draw = torch.Generator().manual_seed(6)
    return [
        (
            {"batch": {name: torch.randn(BATCH, WIDTH, generator=draw, dtype=dtype) for name in "xz"}},
            torch.randint(0, 3, (BATCH,), generator=draw),
        )
        for _ in range(3)
    ]


def pins_of(model, example, device_of):
    """A drawn device for each operation; those that must be together have one."""
    blocks, together = blocks_of(trace(model, example))
    first = list(range(len(blocks)))
    for members in together:
        joined = {first[one] for one in members}
        first = [min(joined) if one in joined else one for one in first]
    return {name: device_of[first[at] % len(device_of)] for at, block in enumerate(blocks) for name in block}


def losses(outs, y):
    """Several, of different weights."""
    return sum(weight * F.cross_entropy(out, y) for weight, out in enumerate(outs, 1))


def anneal(model, step):
    model.beta = 1.0 / (1 + step)


def close(share, one, other):
    """Equal but for sums in another order; bfloat16 casts a layer that is called twice once in the model, twice in parts."""
    largest = max(0.01, float(other.abs().max()))  # a bias before batch norm has what rounding leaves of a gradient
    return one.shape == other.shape and torch.allclose(one, other, rtol=share, atol=share * largest)


DRAWN = (
    operations(),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),  # what the heads read
    st.lists(st.integers(0, 2), min_size=7, max_size=7),  # the operations' devices
)


@settings(max_examples=15)
@given(*DRAWN)
def test_three_steps_are_those_of_the_model(operations, heads, device_of):
    check(operations, heads, device_of)


@pytest.mark.soak
@settings(max_examples=1000)
@given(*DRAWN)
def test_three_steps_of_a_thousand_models(operations, heads, device_of):
    check(operations, heads, device_of)


def test_a_gradient_that_is_zero_but_for_rounding():
    """The first layer's bias, before batch norm, whose results are read on two workers."""
    drawn = [("factor", 0, 0), ("add", 2, 0), ("norm", 2, 2), ("add", 2, 0), ("factor", 1, 3), ("add", 2, 0)]
    operations = tuple(Operation(kind, (read, read), layer) for kind, read, layer in drawn)
    check(operations, [0, 0, 1], [0, 0, 1, 0, 2, 2, 2])


def check(operations, heads, device_of):
    torch.manual_seed(0)
    is_cast = any(one.kind == "autocast" for one in operations)  # which leaves float64 as it is
    dtype = torch.float32 if is_cast else torch.float64
    model, data = Drawn(operations, heads).to(dtype), batches(dtype)
    compare(
        model,
        pins_of(model, data[0][0], device_of),
        workers=3,
        data=data,
        before_step=anneal,
        loss_of=losses,
        close=partial(close, 3e-2 if is_cast else 1e-9),
        all_busy=False,
    )
