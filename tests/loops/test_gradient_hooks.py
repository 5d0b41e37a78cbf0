"""Hooks of the loop that change a parameter's gradient during `backward`."""

import pytest
import torch
from torch import nn

import paceline as pl
from loops.coder import own_id

X = torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
AVERAGED = ["all-reduce", "all-reduce(sharded=true)", "all-reduce(bucket_bytes=1)"]


def change_in_place(p):
    p.grad.mul_(0.1)


def replace(p):
    p.grad = p.grad * 0.1


def trained(inputs, when, hook, attach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def register(now):
        for p in model.parameters() if now == when else ():
            p.register_post_accumulate_grad_hook(hook)

    register("before attach")
    with attach(model, optimizer):
        register("inside")
        for number, x in enumerate(inputs):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            register(number)
            loss.backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("hook", [change_in_place, replace])
@pytest.mark.parametrize("when", ["before attach", "inside", 0, 2])
@pytest.mark.parametrize("algorithm", AVERAGED)
def test_they_act_as_in_one_process(algorithm, when, hook):
    found = {}

    def loop():
        found[own_id()] = trained(X[own_id()], when, hook, pl.attach)

    pl.simulate(loop, workers=2, algorithm=algorithm)
    expected = trained(torch.cat([*X], dim=1), when, hook, lambda *_: torch.enable_grad())
    for x in found.values():
        torch.testing.assert_close(x, expected)
