"""An optimizer that is not PyTorch's, applied by servers in real processes."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from optim.lion import Lion, Loud
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.settings import settings_of

BATCHES = [torch.randn(8, 5, generator=torch.Generator().manual_seed(n)) for n in range(12)]


def trained(optimizer, batches):
    """Plainly."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    own = optimizer(model.parameters(), lr=0.01)
    for x in batches:
        own.zero_grad()
        model(x).square().mean().backward()
        own.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Loop:
    """One worker's, which writes what it ends with."""

    def __init__(self, path, optimizer=Lion):
        self.path, self.optimizer = path, optimizer

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Linear(5, 2)
        optimizer = self.optimizer(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(BATCHES):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.save(nn.utils.parameters_to_vector(model.parameters()).detach(), self.path / f"{worker.worker_id}.pt")


def test_servers_apply_an_optimizer_that_says_that_it_is_elementwise(tmp_path):
    """In sync, two workers' batches are one of twice the size."""
    pl.launch(Loop(tmp_path), workers=2, algorithm="parameter-server(mode=sync(backups=0), shards=2)")
    expected = trained(Lion, [torch.cat(BATCHES[n : n + 2]) for n in range(0, len(BATCHES), 2)])
    torch.testing.assert_close(torch.load(tmp_path / "0.pt"), expected)


def test_others_are_refused_with_the_remedy(tmp_path):
    says = r"^A server cannot apply Loud, .*; or, if Loud updates .*, say so by `elementwise = True` in the class; or local"
    with pytest.raises(pl.UsageError, match=says):
        pl.launch(Loop(tmp_path, Loud), workers=2, algorithm="parameter-server")


def its_own_class(path):
    class Own(Lion):
        elementwise = True

    Loop(path, Own)()


def test_a_class_that_servers_cannot_import_ends_the_run_with_the_remedy(tmp_path):
    says = r"^A server cannot import the optimizer its_own_class\.<locals>\.Own: define its class at the top level of a module"
    with pytest.raises(pl.UsageError, match=says):
        pl.launch(partial(its_own_class, tmp_path), workers=2, algorithm="parameter-server")


def test_its_state_outlives_a_server():
    """With momentum of its own, in parts of the vector."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    where = dict(zip(parameters, [(0, 3), (3, 5)], strict=True))
    settings, x, plain = settings_of(Lion(parameters, lr=0.1), where.get), torch.ones(5), Lion(parameters, lr=0.1)
    owner = FlatOptimizer(settings, x[1:], 1)
    for step in range(4):
        g = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0]) * (-1) ** step
        parameters[0].grad, parameters[1].grad = g[:3], g[3:]
        plain.step()
        with torch.no_grad():
            owner.step(g[1:], settings)
        assert torch.equal(x[1:], torch.cat([one.detach() for one in parameters])[1:])
        state, owner = owner.state(), FlatOptimizer(settings, x[1:], 1)
        owner.load(state)


@pytest.mark.parametrize("name", ["os:system", "optim.lion:Loud", "optim.lion:Missing", "no.such.module:Kind", "SGD2"])
def test_a_message_names_no_other_class(name):
    parameter = nn.Parameter(torch.zeros(3))
    settings = settings_of(Lion([parameter]), lambda _: (0, 3))
    assert type(settings).from_tensor(settings.to_tensor()) == settings
    with pytest.raises(ValueError, match=r"no (elementwise )?optimizer|cannot import the optimizer"):
        type(settings).from_tensor(settings._replace(name=name).to_tensor())
