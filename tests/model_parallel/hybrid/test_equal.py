"""Workers in groups train as one process does with all their samples as one batch."""

import pytest
import torch
from torch import nn

from model_parallel.hybrid import rooms
from model_parallel.hybrid.rooms import Trained, adamw, alone, batches, sgd, small_vgg
from paceline.model_parallel.axes import LoneCollectives
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.optim.sharding import REPLICAS

EQUAL = {"rtol": 0.0, "atol": 1e-12}


def check_equal(optimizer_of, shares, layout, model=None):
    model = model if model is not None else small_vgg()
    data = batches(sum(shares))
    expected, optimizer, steps = alone(model, optimizer_of, data)
    trained = Trained(model, optimizer_of, data, shares, layout)
    for step, (loss, of_inputs) in enumerate(steps):
        assert sum(one[step] for one in trained.losses if one) == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(torch.cat([one[step] for one in trained.inputs if one]), of_inputs, **EQUAL)
    for worker, found in enumerate(trained.models):
        assert found.state_dict().keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                found.state_dict()[name], value, **EQUAL, msg=lambda text, n=name: f"{n}: {text}"
            )
        if trained.plan.parts == 1:
            continue
        by_name = {name: trained.optimizers[worker].state[one] for name, one in found.named_parameters()}
        for name, parameter in expected.named_parameters():
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(by_name[name][key], value, **EQUAL)
    return trained


@pytest.mark.parametrize("optimizer_of", [adamw, sgd])
@pytest.mark.parametrize("pairing", ["gather", "column-row"])
@pytest.mark.parametrize(("workers", "groups"), [(4, 1), (4, 2), (4, 4), (2, 1), (3, 1)])
def test_three_steps_are_equal_to_one_process(optimizer_of, pairing, workers, groups):
    trained = check_equal(optimizer_of, [4] * workers, HybridParallel(groups=groups, pairing=pairing, min_weights=500))
    assert [layer.name for layer in trained.plan.layers] == ([] if groups == workers else ["5.0", "5.3"])


@pytest.mark.parametrize("shares", [[5, 3, 4, 2], [4, 4, 4, 0], [0, 4, 4, 1]])
@pytest.mark.parametrize("pairing", ["gather", "column-row"])
def test_batches_of_other_sizes_and_a_worker_without_one_are_no_exception(shares, pairing):
    check_equal(sgd, shares, HybridParallel(groups=2, pairing=pairing, min_weights=500))


@pytest.mark.parametrize("layers", ["5.0", "5.3-5.6", "5.0-5.6", "5.0-5.3-5.6"])
@pytest.mark.parametrize("pairing", ["gather", "column-row"])
def test_any_of_the_layers_can_be_cut(layers, pairing):
    trained = check_equal(adamw, [3, 3], HybridParallel(groups=1, pairing=pairing, layers=layers))
    assert "-".join(layer.name for layer in trained.plan.layers) == layers


def test_layers_without_bias_and_a_layer_of_its_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(192, 32, bias=False), nn.Linear(32, 10, bias=False)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x.flatten(1))))

    torch.manual_seed(1)
    trained = check_equal(sgd, [2, 2, 2, 2], HybridParallel(groups=2, layers="first"), Own().double())
    assert trained.shapes[0] == {"first.weight": (16, 192), "second.weight": (10, 32)}


def test_the_norm_counts_every_parameter_once():
    model, data = small_vgg(), batches(8)
    expected, _, _ = alone(model, sgd, data[:1])
    before = dict(model.named_parameters())
    norm = sum(((before[name] - one) / 0.1).square().sum() for name, one in expected.named_parameters()).sqrt().item()
    trained = Trained(model, sgd, data[:1], [2] * 4, HybridParallel(groups=2, min_weights=500))
    assert trained.norms[0] == pytest.approx(norm, rel=1e-9)


def test_without_averages_across_groups_the_result_is_another(monkeypatch):
    made = rooms.carriers

    def without_replicas(*arguments):
        return [({**along, REPLICAS: LoneCollectives()}, everybody) for along, everybody in made(*arguments)]

    monkeypatch.setattr(rooms, "carriers", without_replicas)
    with pytest.raises(AssertionError):
        check_equal(sgd, [4] * 4, HybridParallel(groups=2, min_weights=500))
