"""What refers to a parameter's memory from before attach, under a launcher: refused, warned of, or harmless."""

import copy
import gc
import io
import warnings

import pytest
import torch
from torch import nn

import paceline as pl


def attached(make, keep=lambda model: None, workers=1):
    """What a launched loop over such a model says; `keep` is called before attach, and what it returns is held."""

    def loop():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        held = keep(model)
        with pl.attach(model, optimizer):
            sum(p.sum() for p in model.parameters()).backward()
            optimizer.step()
        del held

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pl.simulate(loop, workers=workers, algorithm="hogwild")
    return [str(one.message) for one in said if "parameters' memory" in str(one.message)]


def tied_by_data():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    return model


def with_a_view_in_a_buffer():
    model = nn.Linear(3, 3)
    model.register_buffer("transposed", model.weight.data.t())
    return model


def with_a_view_in_a_list():
    model = nn.Linear(3, 3)
    model.views = [model.weight.t()]
    return model


def with_a_frozen_alias():
    model = tied_by_data()
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", [tied_by_data, with_a_view_in_a_buffer, with_a_view_in_a_list, with_a_frozen_alias])
def test_what_the_model_holds_in_the_same_memory_is_refused(make, workers):
    with pytest.raises(pl.UsageError, match=r"share memory, .* as in `b\.weight = a\.weight`"):
        attached(make, workers=workers)


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: model.state_dict(),
        lambda model: [p.detach() for p in model.parameters()],
        lambda model: model.weight.detach().numpy(),
        lambda model: model.weight.data.t(),
    ],
    ids=["state_dict", "detach", "NumPy", "a view"],
)
def test_what_others_hold_is_warned_of_once(keep):
    assert len(attached(lambda: nn.Linear(3, 3), keep)) == 1
    assert len(attached(lambda: nn.Linear(3, 3), keep, workers=2)) == 1


def leave_garbage(model):
    ring = [model.weight.untyped_storage(), model.weight.detach()]
    ring.append(ring)


def save(model):
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("keep", [leave_garbage, save])
def test_garbage_is_not_warned_of(keep):
    gc.disable()
    try:
        assert not attached(lambda: nn.Linear(3, 3), keep)
    finally:
        gc.enable()


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def parts_of_one_matrix():
    matrix, model = torch.randn(4, 6), nn.Module()
    model.left, model.right = nn.Parameter(matrix[:, :3]), nn.Parameter(matrix[:, 3:])
    return model


def parts_of_one_vector():
    """After `vector_to_parameters`, all parameters are views of one vector, here of 40 MB."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(150)])
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())
    return model


def spectral():
    return nn.utils.spectral_norm(nn.Linear(3, 3))


def loaded_by_assignment():
    model = nn.Linear(3, 3)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.LSTM(3, 4, 2),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        tied,
        parts_of_one_matrix,
        pytest.param(parts_of_one_vector, marks=pytest.mark.timeout(10)),
        spectral,
        loaded_by_assignment,
    ],
)
def test_models_that_share_nothing_are_trained(make):
    assert attached(make, copy.deepcopy) == []


def trained(make, algorithm, own):
    def loop():
        torch.manual_seed(0)
        model = make(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        data = list(torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1)))
        with pl.attach(model, optimizer) as worker:
            for x in data if own else worker.batches(data):
                optimizer.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss = loss + sum(p.sum() for name, p in model.named_parameters() if "empty" in name)
                loss.backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return loop() if algorithm is None else pl.simulate(loop, workers=1, algorithm=algorithm).returned[0]


def without_elements(model):
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.insert(0, nn.Identity())
    model[0].register_parameter("empty", nn.Parameter(torch.zeros(0)))
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("own", [False, True], ids=["batches", "own batches"])
@pytest.mark.parametrize(
    "algorithm", ["hogwild", "all-reduce", "all-reduce(sharded=true)", "parameter-server(mode=async)"]
)
@pytest.mark.parametrize(
    "make",
    [without_elements, torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(2, 4))],
    ids=["without elements", "scripted", "traced"],
)
def test_empty_parameters_and_scripted_models_are_trained(make, algorithm, own):
    torch.testing.assert_close(trained(make, algorithm, own), trained(make, None, own))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_buffer_is_refused_and_a_nested_attribute_stays(layout):
    def make():
        model = nn.Linear(3, 3)
        model.spans = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        return model

    def with_a_buffer():
        model = make()
        model.register_buffer("names", model.spans)
        return model

    assert not attached(make, workers=2)
    with pytest.raises(pl.UsageError, match="The buffer names is a nested tensor"):
        attached(with_a_buffer, workers=2)
