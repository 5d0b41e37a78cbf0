"""Whole states: saved on one mesh, training goes on from them on any other."""

import io

import pytest
import torch

from model_parallel.tensor.model import OPTIMIZERS, assert_equal, built, steps
from model_parallel.tensor.threads import on_each
from paceline.errors import UsageError
from paceline.model_parallel.tensor import state
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line


def first_part(mesh, optimizer):
    """Two steps, then what worker 0 would write."""
    model = built(mesh, dropout=0.1)
    one = OPTIMIZERS[optimizer](model.parameters())
    steps(model, one, mesh, 0, 2)
    file = io.BytesIO()
    torch.save({"model": state.full_state_dict(model), "optimizer": state.full_optimizer_state(model, one)}, file)
    return file.getvalue()


def second_part(mesh, optimizer, saved):
    """A third step, in a model that was initialised otherwise and an optimizer with another rate."""
    mesh.seed += 1
    model = built(mesh, dropout=0.1)
    mesh.seed -= 1
    for module in model.modules():
        if hasattr(module, "_stream"):
            module._stream = (mesh.seed, module._stream[1])  # the seed is the run's configuration, not its state
    one = OPTIMIZERS[optimizer](model.parameters())
    one.param_groups[0]["lr"] = 7.0
    saved = torch.load(io.BytesIO(saved))
    state.load_full_state_dict(model, saved["model"])
    state.load_full_optimizer_state(model, one, saved["optimizer"])
    found = steps(model, one, mesh, 2, 4)
    return found, state.full_state_dict(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_on_a_grid_it_goes_on_on_a_line_on_one_worker_and_on_a_grid(optimizer):
    alone = Mesh.open(Line(1))
    model = built(alone, dropout=0.1)
    one = OPTIMIZERS[optimizer](model.parameters())
    expected = steps(model, one, alone, 0, 4)[2:], state.full_state_dict(model)
    saved = on_each(Grid(2, 2), lambda mesh: first_part(mesh, optimizer))
    for shape in (Line(4), Line(1), Grid(2), Grid(2, 2)):
        for found in on_each(shape, lambda mesh: second_part(mesh, optimizer, saved[mesh.axes["world"].index])):
            assert_equal(found, expected)


def test_names_and_shapes_are_the_whole_models():
    whole = {name: one.shape for name, one in built(Mesh.open(Line(1))).state_dict().items()}

    def shapes(mesh):
        model = built(mesh)
        mine = {name: one.shape for name, one in model.state_dict().items()}
        assert mine.keys() == whole.keys()
        assert mine["blocks.0.mlp.wide.weight"] != whole["blocks.0.mlp.wide.weight"]
        return {name: one.shape for name, one in state.full_state_dict(model).items()}

    for shape in (Line(3), Grid(2, 2)):
        assert all(found == whole for found in on_each(shape, shapes))


def test_a_state_of_another_model_is_refused():
    mesh = Mesh.open(Line(1))
    model = built(mesh)
    whole = state.full_state_dict(model)
    with pytest.raises(UsageError, match=r"only one of the two has norm\.bias"):
        state.load_full_state_dict(model, {name: one for name, one in whole.items() if name != "norm.bias"})
    with pytest.raises(
        UsageError, match=r"The saved norm\.bias belongs to another model: .* \(5,\), but this model's is \(24,\)"
    ):
        state.load_full_state_dict(model, {**whole, "norm.bias": torch.zeros(5)})
    one = torch.optim.SGD([{"params": [model.norm.bias]}, {"params": [model.norm.weight]}], momentum=0.9)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(UsageError, match="has different parameter groups"):
        state.load_full_optimizer_state(model, other, state.full_optimizer_state(model, one))
