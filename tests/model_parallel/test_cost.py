"""What parts of a model take: long operations are measured alone, short ones together, and the time is spread."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.model_parallel.graph import cost, placing
from paceline.model_parallel.graph.cost import Measured, measure, spread
from paceline.model_parallel.graph.problem import Group
from paceline.model_parallel.graph.trace import trace


def test_a_blocks_time_is_spread_by_operations_and_bytes():
    groups = [Group("conv", flops=9e6), Group("relu", saved_bytes=100_000), Group("view"), Group("long", flops=1.0)]
    blocks = [Group("relu", forward_s=1.0, backward_s=4.0), Group("long", forward_s=3.0)]
    conv, relu, view, alone = spread(groups, [[0, 1, 2], [3]], blocks)
    assert (conv.forward_s, relu.forward_s, view.forward_s, alone.forward_s) == pytest.approx((0.9, 0.1, 0.0, 3.0))
    assert (conv.backward_s, relu.backward_s) == pytest.approx((3.6, 0.4))
    assert (conv.name, relu.saved_bytes) == ("conv", 100_000)
    first, second = spread([Group("a"), Group("b")], [[0, 1]], [Group("b", forward_s=1.0)])
    assert first.forward_s == second.forward_s == 0.5, "evenly, where nothing is known"


def test_short_operations_are_measured_with_their_neighbours_and_long_ones_alone(monkeypatch):
    asked = []

    def times(model, traced, groups, arguments, **options):
        """Linear layers take 3 ms and others 0.1 ms; blocks of the second call 4 ms."""
        real = measure(model, traced, groups, arguments, repeats=1, busy_cores=0)
        asked.append(tuple(groups))
        forward = [1e-3 if len(asked) == 2 else 1e-3 if one.flops else 1e-5 for one in real.groups]
        found = tuple(replace(g, forward_s=s, backward_s=3 * s) for g, s in zip(real.groups, forward, strict=True))
        total = sum(one.step_s for one in found)
        return Measured(found, total, total)

    monkeypatch.setattr(placing, "measure", times)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    plan = pl.place(model, torch.randn(32, 64), devices=2)
    names = [f"_{at}" for at in range(5)]
    assert asked == [tuple((one,) for one in names), (("_0", "_1"), ("_2", "_3"), ("_4",))]
    assert plan.error == 0
    took = {one.name: one.step_s for one in plan.problem.groups}
    assert sum(took.values()) == pytest.approx(12e-3)
    assert took["_0"] == took["_2"], "equal layers take equally long"


class Replayed:
    """A runner of which each group takes the next of its given times; they are in ms."""

    def __init__(self, whole_ms=None, **times_ms):
        self._whole = itertools.repeat(10.0) if whole_ms is None else iter(whole_ms)
        self._left = {name: iter(times) for name, times in times_ms.items()}

    def group(self, names):
        return 1e-3 * next(self._left[names[-1]]), 0.0

    def whole(self, arguments):
        return 1e-3 * next(self._whole)

    def flops(self, names):
        return 0.0


def test_a_block_that_was_disturbed_is_measured_again_and_its_steadiest_times_count(monkeypatch):
    x = torch.randn(4, 8)
    traced = trace(model := nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), x)
    quiet, disturbed = [5.0, 5.1, 5.0, 4.9, 5.0], [6.0, 15.0, 9.0, 5.0, 12.0]
    runner = Replayed(
        _0=[50.0, *quiet],  # its first run is a warm-up
        _1=[50.0, *disturbed, *quiet],
        _2=[50.0, *disturbed, *[9.0, 7.0, 8.0, 10.0, 8.0], *disturbed, *disturbed],
    )
    monkeypatch.setattr(cost, "_Runner", lambda model, traced: runner)
    groups = [(f"_{at}",) for at in range(3)]
    found = measure(model, traced, groups, {"input": x}, busy_cores=0)
    assert [one.forward_s for one in found.groups] == pytest.approx([5e-3, 5e-3, 8e-3])
    assert all(not list(left) for left in runner._left.values()), "no block is measured more or less often"
    assert found.step_s == 10e-3


def test_a_core_that_becomes_slower_for_a_while_disturbs_no_block(monkeypatch):
    x = torch.randn(4, 8)
    traced = trace(model := nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), x)
    slowness = [1.0, 1.0, 1.4, 1.4, 1.0]
    whole, first, second = ([50.0, *(ms * by for by in slowness)] for ms in (10.0, 4.0, 6.0))
    runner = Replayed(whole_ms=whole, _0=first, _1=second)
    monkeypatch.setattr(cost, "_Runner", lambda model, traced: runner)
    found = measure(model, traced, [("_0",), ("_1",)], {"input": x}, busy_cores=0)
    assert [one.forward_s for one in found.groups] == pytest.approx([4e-3, 6e-3])
    assert found.step_s == pytest.approx(10e-3)
    assert found.error == pytest.approx(0.0)
