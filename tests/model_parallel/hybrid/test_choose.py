"""The chooser: `advise layers`, `groups=auto`, and what the dynamic programme finds."""

import itertools

import pytest
import torch

import paceline as pl
from model_parallel.hybrid.rooms import small_vgg
from model_parallel.hybrid.test_train import TASK
from paceline.model_parallel.hybrid.choose import (
    candidates_of,
    checked_layout,
    chosen_layout,
    counted_s,
    layout_for,
)
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.plan import plan_cuts
from paceline.planner.balance import Layer
from paceline.planner.layout_choice import Candidate, choose_layouts

FC6, FC7, FC8 = ((25088, 4096), (4096, 4096), (4096, 1000))
LINK = {"latency_s": 0.0, "bytes_per_s": 1e9}


def chain(*shapes, joined=True):
    return [
        Candidate(layer=Layer(name=str(at), ifm=i, ofm=o), can_cut=True, follows=joined and at > 0)
        for at, (i, o) in enumerate(shapes)
    ]


def nothing(*_):
    return 0.0


@pytest.mark.parametrize(
    ("shape", "nodes", "batch", "groups"), [(FC6, 128, 512, 4), (FC6, 16, 256, 1), (FC7, 128, 512, 4)]
)
def test_by_bytes_alone_a_layers_groups_are_those_of_the_equations(shape, nodes, batch, groups):
    best = choose_layouts(chain(shape), nodes=nodes, batch=batch, compute_s=nothing, **LINK)[0]
    assert best.groups == groups


def test_latency_moves_the_choice_to_fewer_and_smaller_operations():
    few = choose_layouts(chain(FC7), nodes=16, batch=64, compute_s=nothing, latency_s=0.0, bytes_per_s=1e9)[0]
    slow = choose_layouts(chain(FC7), nodes=16, batch=64, compute_s=nothing, latency_s=1.0, bytes_per_s=1e9)[0]
    assert few.groups != slow.groups
    assert few.sent_bytes < slow.sent_bytes


def test_sent_bytes_are_those_of_the_plan():
    model = small_vgg()
    candidates = candidates_of(model, torch.zeros(1, 3, 8, 8, dtype=torch.float64), HybridParallel(min_weights=500))
    assert [one.layer.name for one in candidates if one.can_cut] == ["5.0", "5.3"]
    for choice in choose_layouts(candidates, nodes=4, batch=16, compute_s=nothing, **LINK):
        if choice.cut:
            plan = plan_cuts(model, layout_for(choice), 4)
            inside = plan.group_bytes(rows=4)
            holders = {"whole": 4, "by outputs": choice.groups, "by inputs": choice.groups}
            weights = {one.layer.name: one.layer.weights for one in candidates}
            across = sum(
                2 * (n - 1) / n * weights[one.name] * 4 / (plan.parts if one.how != "whole" else 1)
                for one in choice.layers
                for n in (holders[one.how],)
            )
            assert choice.sent_bytes == pytest.approx(inside + across)


def test_the_programme_is_as_good_as_trying_all_subsets():
    shapes = [(64, 512), (512, 256), (256, 2048), (2048, 16)]
    whole = chain(*shapes)
    for pairing, latency_s in itertools.product(("gather", "column-row"), (0.0, 1e-5)):
        link = {"latency_s": latency_s, "bytes_per_s": 1e9, "compute_s": nothing, "pairings": (pairing,)}
        best = choose_layouts(whole, nodes=8, batch=32, **link)[0]
        tried = []
        for cut in itertools.product((False, True), repeat=4):
            some = [
                Candidate(layer=one.layer, can_cut=c, follows=one.follows and c and before)
                for one, c, before in zip(whole, cut, (False, *cut), strict=False)
            ]
            tried += [one for one in choose_layouts(some, nodes=8, batch=32, **link) if len(one.cut) == sum(cut)]
        assert best.time_s == pytest.approx(min(one.time_s for one in tried))


def test_auto_is_resolved_before_training_and_recorded(tmp_path):
    config = pl.TrainConfig(
        task=f"{TASK}:without_dropout", workers=2, steps=2, algorithm="all-reduce", backend="threads",
        layout="hybrid(groups=auto, min_weights=500)",
    )  # fmt: skip
    run = pl.train(config, out=tmp_path / "run")
    assert run.result["steps"] == 2
    assert run.config["layout"].startswith("hybrid(groups=")


def test_choosing_a_layout_leaves_the_example_as_it_was():
    model = torch.nn.Sequential(
        torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )
    inputs = torch.randn(4, 8)
    before, layout = inputs.clone(), HybridParallel(min_weights=1)
    checked_layout(layout, model, inputs, workers=2, batch_size=4, compute_s=counted_s)
    assert torch.equal(inputs, before)


def test_auto_keeps_what_is_given():
    inputs = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    given = HybridParallel(groups=2, min_weights=500)
    link = {"workers": 4, "batch_size": 4}
    assert chosen_layout(given, small_vgg(), inputs, **link) is given
    chosen = chosen_layout(HybridParallel(min_weights=500, pairing="column-row"), small_vgg(), inputs, **link)
    assert chosen.groups in (1, 2, 4)
    with pytest.raises(pl.UsageError, match="No linear layer of the model can be cut"):
        chosen_layout(HybridParallel(), small_vgg(), inputs, **link)
