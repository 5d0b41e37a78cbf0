"""Three steps on any mesh are those of one process, in float64 to 1e-12; meshes of threads, [3,3,2] among them."""

import pytest
import torch

from chosen import each_value
from model_parallel.tensor.model import OPTIMIZERS, Plain, assert_equal, built, data, trained
from model_parallel.tensor.threads import on_each
from paceline.model_parallel.tensor import state
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line

# In an order in which each mode has both optimizers.
MESHES = [
    *((Line(n), "allgather") for n in (2, 3, 4)),
    *((Grid(*of), mode) for of in ((1, 3), (2, 2)) for mode in ("allgather", "summa")),
    *((Grid(*of), mode) for of in ((2, 1), (3, 2)) for mode in ("summa", "allgather")),
]


@pytest.fixture(scope="module")
def alone():
    """What one worker comes to, by what is asked; computed once."""
    found = {}

    def ask(**options):
        key = tuple(sorted(options.items()))
        if key not in found:
            found[key] = trained(Mesh.open(Line(1)), **options)
        return found[key]

    return ask


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_plain_pytorch(optimizer, is_tied):
    mesh = Mesh.open(Line(1))
    model = Plain(state.full_state_dict(built(mesh, is_tied=is_tied)))
    one = OPTIMIZERS[optimizer](model.parameters())
    found, whole, _ = trained(mesh := Mesh.open(Line(1)), optimizer, is_tied=is_tied)
    for step in range(3):
        tokens, following, more = data(step)
        more.requires_grad_()
        one.zero_grad()
        loss = model(tokens, following, more)
        loss.backward()
        one.step()
        torch.testing.assert_close(found[step][0], loss.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(found[step][1], more.grad, rtol=0, atol=1e-12)
    for name in model.names:
        torch.testing.assert_close(whole[name], model.of(name).detach(), rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize(("mesh", "optimizer"), each_value(MESHES, list(OPTIMIZERS)), ids=str)
def test_a_mesh_is_one_worker(mesh, optimizer, alone):
    shape, mode = mesh
    is_tied = optimizer == "adamw"
    for found in on_each(shape, lambda mesh: trained(mesh, optimizer, is_tied=is_tied), mode=mode):
        assert_equal(found, alone(optimizer=optimizer, is_tied=is_tied))
