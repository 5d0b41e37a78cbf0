"""The balance equations against figures worked out by hand, and against every number of groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.layers import model_layers
from paceline.planner.balance import Layer, balance, exposed_s, hybrid_bytes, min_points_per_node

VGG_A = [(3, 64, 224), (64, 128, 112), (128, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28), (512, 512, 14)]
VGG_A += VGG_A[-1:]
OVERFEAT = [(3, 96, 11, 56), (96, 256, 5, 24), (256, 512, 3, 12), (512, 1024, 3, 12), (1024, 1024, 3, 12)]


def conv(ifm, ofm, out, kernel=3, size=None):
    return Layer(name="conv", ifm=ifm, ofm=ofm, kernel=kernel**2, in_size=(size or out) ** 2, out_size=out**2)


def ratio(layers, points=1):
    return sum(one.operations(points) for one in layers) / sum(one.weight_bytes(1.0) for one in layers)


def test_published_networks_and_machines():
    assert ratio([conv(*one) for one in VGG_A]) == pytest.approx(1218, abs=0.5)
    assert ratio([conv(i, o, size, k) for i, o, k, size in OVERFEAT]) == pytest.approx(251, abs=0.5)
    cloud, cluster = 18 * 2.9e9 * 32 / 1.25e9, 32 * 2.3e9 * 32 / 7e9  # 10 GbE and FDR InfiniBand
    assert (round(cloud), round(cluster, 1)) == (1336, 336.5)
    vgg = [conv(*one) for one in VGG_A]
    assert min_points_per_node(vgg, cloud) == 2
    assert min_points_per_node(vgg, cluster) == 1
    assert min_points_per_node([conv(i, o, size, k) for i, o, k, size in OVERFEAT], cloud) == 6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 11), st.integers(1, 224), st.integers(1, 64))
def test_a_layer_computes_one_and_a_half_operations_per_byte_pixel_and_point(ifm, ofm, kernel, out, points):
    """Whatever its kernel and number of maps."""
    assert ratio([conv(ifm, ofm, out, kernel)], points) == pytest.approx(1.5 * out**2 * points)


def fully_connected(ofm):
    return Layer(name="fc", ifm=1000, ofm=ofm)


def split(layer, nodes, batch, overlap=0.0):
    return balance([layer], nodes=nodes, batch=batch, operations_per_s=1e12, bytes_per_s=1e9, overlap=overlap).splits[0]


@pytest.mark.parametrize(("nodes", "batch", "groups"), [(64, 256, 2), (128, 512, 4)])
def test_groups_of_the_known_cases(nodes, batch, groups):
    found = split(fully_connected(4096), nodes, batch)
    assert math.sqrt(nodes * batch / 4096) == groups
    assert (found.groups, found.kind) == (groups, "hybrid")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 8192),
    st.integers(1, 5),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3, 5, 8, 12, 64]),
    st.integers(1, 2048),
    st.floats(0, 1),
)
def test_no_other_number_of_groups_sends_less(ofm, kernel, size, nodes, batch, overlap):
    layer = conv(16, ofm, size, kernel)
    found = split(layer, nodes, batch, overlap)
    assert nodes % found.groups == 0
    every = {G: hybrid_bytes(layer, G, nodes, batch, overlap) for G in range(1, nodes + 1) if nodes % G == 0}
    assert found.sent_bytes == min(every.values())
    assert found.data_bytes == pytest.approx(layer.weight_bytes(overlap) if nodes > 1 else 0)
    assert found.kind == {1: "model", nodes: "data"}.get(found.groups, "hybrid") or nodes == 1
    # Between the ends the number is next to the one at which the derivative is zero.
    if 1 < found.groups < nodes:
        inner = [G for G in every if 1 < G < nodes]
        ideal = math.sqrt(2 * nodes * batch * layer.in_size * layer.ifm / (layer.weights * (2 - overlap)))
        assert abs(math.log(found.groups / ideal)) <= 1e-9 + min(abs(math.log(G / ideal)) for G in inner)


def test_model_parallelism_is_for_layers_with_more_outputs_than_points():
    """Of two: model where ofm kernel (2 - overlap) > 2 in_size batch, with gathers in both directions counted."""
    assert split(fully_connected(4096), 2, 256, overlap=1.0).kind == "model"
    assert split(fully_connected(256), 2, 256, overlap=1.0).kind == "data"
    assert split(conv(64, 64, 28), 2, 256).kind == "data"


def test_sending_hides_behind_the_layers_before():
    layers = [conv(16, 16, 10), conv(16, 16, 10), fully_connected(5000)]
    step_s = layers[0].operations(4) / 1e9
    sent_s = [one.weight_bytes(1.0) / 1e8 for one in layers]
    found = exposed_s(layers, points=4, operations_per_s=1e9, bytes_per_s=1e8)
    assert found[0] == sent_s[0]  # nothing comes before it
    assert found[1] == max(0, sent_s[1] - step_s) == 0
    assert found[2] == pytest.approx(sent_s[2] - 2 * step_s)


def test_the_limit_of_data_parallelism_is_where_computing_takes_as_long_as_sending():
    layers = [conv(*one) for one in VGG_A]
    found = balance(layers, nodes=16, batch=256, operations_per_s=18 * 2.9e9 * 32, bytes_per_s=1.25e9)
    assert (found.min_points, found.max_nodes) == (2, 128)
    assert found.machine_operations_per_byte == pytest.approx(1336.3, abs=0.05)


def test_layers_of_a_model():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, (1, 3), groups=4),
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    model.train()
    found = model_layers(model, torch.zeros(2, 3, 8, 10))
    assert model.training
    sizes = [(one.name, one.ifm, one.ofm, one.kernel, one.in_size, one.out_size) for one in found]
    assert sizes == [("0", 3, 8, 9, 80, 20), ("2", 2, 8, 3, 80, 12), ("4", 96, 10, 1, 1, 1)]
    assert [one.weights for one in found] == [one.weight.numel() for one in (model[0], model[2], model[4])]
    sequence = model_layers(nn.Linear(4, 6), torch.zeros(2, 7, 4))
    assert [(one.name, one.in_size, one.out_size) for one in sequence] == [("weight", 7, 7)]
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    weights = [one.weights for one in model_layers(attention, torch.zeros(1, 5, 8))]
    assert weights == [128, 128]  # the MLP; attention is one operation


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": []}, "no convolution and no fully connected"),
        ({"nodes": 0}, "must be 1 or more, not 0 and 8"),
        ({"overlap": 1.5}, "share from 0 to 1, not 1.5"),
        ({"bytes_per_s": 0}, "above 0"),
    ],
)
def test_refused_in_one_sentence(change, says):
    arguments = {"layers": [fully_connected(4)], "nodes": 2, "batch": 8, "operations_per_s": 1e9, "bytes_per_s": 1e9}
    with pytest.raises(UsageError, match=says):
        balance(**{**arguments, **change})
