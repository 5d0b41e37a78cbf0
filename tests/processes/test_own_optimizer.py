"""An optimizer that is not PyTorch's, applied by servers in real processes."""

import pytest
import torch
from torch import nn

import paceline as pl
from optim.lion import Lion, Loud
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


@pytest.mark.parametrize("name", ["os:system", "optim.lion:Loud", "optim.lion:Missing", "no.such.module:Kind", "SGD2"])
def test_a_message_names_no_other_class(name):
    parameter = nn.Parameter(torch.zeros(3))
    settings = settings_of(Lion([parameter]), lambda _: (0, 3))
    assert type(settings).from_tensor(settings.to_tensor()) == settings
    with pytest.raises(ValueError, match=r"no (elementwise )?optimizer"):
        type(settings).from_tensor(settings._replace(name=name).to_tensor())
