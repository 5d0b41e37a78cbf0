"""What travels: counted operations and bytes are those of the plan, and VGG-A's are those of the balance equations."""

import pytest
import torch
from torch import nn

from model_parallel.hybrid.rooms import STEPS, Trained, batches, sgd, small_vgg
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.plan import plan_cuts
from paceline.planner.balance import Layer, hybrid_bytes

# FC6 to FC8 of VGG-A: MB per worker and step, 4 bytes, no overlap, by (workers, batch) and groups; published equations.
FC6, FC7, FC8 = ((25088, 4096), (4096, 4096), (4096, 1000))
PUBLISHED = [
    (FC6, 64, 256, {1: 51.4, 2: 51.4, 4: 64.2, 8: 109.2, 16: 208.7, 64: 822.1}),
    (FC6, 128, 512, {1: 102.8, 2: 64.2, 4: 51.4, 8: 64.2, 16: 109.2, 128: 822.1}),
    (FC6, 16, 256, {1: 51.4, 2: 128.5, 4: 218.4, 8: 417.5, 16: 822.1}),
    (FC7, 64, 256, {1: 8.4, 2: 8.4, 4: 10.5, 8: 17.8, 16: 34.1, 64: 134.2}),
    (FC7, 128, 512, {1: 16.8, 2: 10.5, 4: 8.4, 8: 10.5, 16: 17.8, 128: 134.2}),
    (FC8, 64, 256, {1: 8.4, 2: 5.2, 4: 4.1, 8: 5.1, 16: 8.7, 64: 32.8}),
    (FC8, 128, 512, {1: 16.8, 2: 8.9, 4: 5.2, 8: 4.1, 16: 5.1, 128: 32.8}),
]


@pytest.mark.parametrize(("shape", "workers", "batch", "published"), PUBLISHED)
def test_bytes_of_vgg_a(shape, workers, batch, published):
    layer = Layer(name="fc", ifm=shape[0], ofm=shape[1])
    for groups, megabytes in published.items():
        found = hybrid_bytes(layer, groups, workers, batch, overlap=0.0) / 1e6
        assert round(found, 1) == megabytes, f"{groups} groups"


def vgg_a():
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(25088, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )


@pytest.mark.parametrize(
    ("workers", "batch", "groups", "cut"),
    [
        (64, 256, 2, 2),
        (128, 512, 4, 2),
        (16, 256, 1, 2),
        (64, 256, 8, 3),
        (64, 256, 16, 3),
    ],  # 1000 outputs by 8, not by 16
)
def test_the_plans_gathers_are_the_equations_but_for_a_workers_own_rows(workers, batch, groups, cut):
    plan = plan_cuts(vgg_a(), HybridParallel(groups=groups), workers)
    assert [layer.name for layer in plan.layers] == ["0", "3", "6"][:cut]
    rows, m = batch / workers, workers // groups
    shapes = (FC6, FC7, FC8)[:cut]
    equation = sum(Layer(name="", ifm=i, ofm=o).activation_bytes(batch / groups) for i, o in shapes)
    back = 2 * rows * shapes[-1][1] / m * (m - 1) * 4  # outputs of the last layer, to the workers whose rows they are
    assert plan.group_bytes(rows) == pytest.approx((m - 1) / m * equation + back, rel=1e-12)


def operations(plan):
    """In a group in one step of one forward and backward pass, by kind, if gradients reach all inputs."""
    gathers = sum(layer.entry in ("rows", "features") for layer in plan.layers)
    gathers += sum(layer.exit == "sum" for layer in plan.layers)
    swaps = 2 * sum(layer.exit == "rows" for layer in plan.layers)
    kinds = {"all-gather": gathers, "reduce-scatter": gathers, "all-to-all": swaps}
    return {kind: number for kind, number in kinds.items() if number}


def test_a_pair_pays_once_for_two_layers():
    by_pairing = {
        one: plan_cuts(vgg_a(), HybridParallel(groups=2, pairing=one, layers="0-3"), 64)
        for one in ("gather", "column-row")
    }
    assert operations(by_pairing["column-row"]) == {"all-gather": 2, "reduce-scatter": 2}
    assert operations(by_pairing["gather"]) == {"all-gather": 2, "reduce-scatter": 2, "all-to-all": 2}
    assert [layer.dim for layer in by_pairing["column-row"].layers] == [0, 1]


@pytest.mark.parametrize("pairing", ["gather", "column-row"])
@pytest.mark.parametrize("groups", [1, 2])
def test_counted_operations_and_bytes_are_the_plans(groups, pairing):
    rows = 4
    layout = HybridParallel(groups=groups, pairing=pairing, min_weights=500)
    trained = Trained(small_vgg(), sgd, batches(4 * rows), [rows] * 4, layout)
    for traffic in trained.traffic:
        counted = {kind: one.calls for (_, kind), one in traffic.items()}
        at_the_end = 2 * 4  # four shards, with their momenta
        if pairing == "column-row":
            at_the_end -= 2  # the second layer's bias is whole
        counted["all-gather"] -= at_the_end
        assert counted.pop("all-reduce") == STEPS, "for each step's norm"
        assert counted == {kind: STEPS * n for kind, n in operations(trained.plan).items()}
        parts = trained.plan.parts
        shards = (
            sum(one.numel() for name, one in trained.models[0].named_parameters() if name in SHARDS[pairing]) // parts
        )
        own = shards * 2 * (parts - 1) * 8 + STEPS * 2 * (parts - 1) / parts * 8
        sent_bytes = float(8 * sum(one.elements for one in traffic.values()))
        assert sent_bytes - own == pytest.approx(STEPS * trained.plan.group_bytes(rows, 8))


SHARDS = {
    "gather": ("5.0.weight", "5.0.bias", "5.3.weight", "5.3.bias"),
    "column-row": ("5.0.weight", "5.0.bias", "5.3.weight"),
}
