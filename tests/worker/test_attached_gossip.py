"""A training loop as one finds it in tutorials becomes AD-PSGD by two lines."""

import ast
import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

MICRO_BATCHES = 2


def make():
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    targets = (inputs @ torch.randn(8, 3)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    return model, optimizer, scheduler, loader


def plain():
    model, optimizer, scheduler, loader = make()
    for _ in range(4):
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y) / MICRO_BATCHES
            loss.backward()
            if (step + 1) % MICRO_BATCHES == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def attached():
    model, optimizer, scheduler, loader = make()
    with pl.attach(model, optimizer, algorithm=pl.ADPSGD()) as worker:
        for _ in range(4):
            for step, (x, y) in enumerate(worker.batches(loader)):
                loss = nn.functional.cross_entropy(model(x), y) / MICRO_BATCHES
                loss.backward()
                if (step + 1) % MICRO_BATCHES == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
    return model, optimizer, scheduler


def keys(model, optimizer):
    states = optimizer.state_dict()["state"]
    return list(model.state_dict()), [sorted(state) for _, state in sorted(states.items())]


def lines_of(function):
    """The function's lines without their indentation, as a diff that ignores it would compare them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    return [line.strip() for part in body for line in ast.unparse(part).splitlines()]


def test_two_lines_make_the_difference():
    before, after = lines_of(plain), lines_of(attached)
    added = [line for line in after if line not in before]
    assert added == [
        "with pl.attach(model, optimizer, algorithm=pl.ADPSGD()) as worker:",
        "for step, (x, y) in enumerate(worker.batches(loader)):",
    ]
    assert [line for line in before if line not in after] == ["for step, (x, y) in enumerate(loader):"]


def test_alone_it_is_the_plain_loop_bit_for_bit():
    model, optimizer, scheduler = plain()
    own, own_optimizer, own_scheduler = attached()
    assert keys(own, own_optimizer) == keys(model, optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(own.state_dict()[name], tensor), name
    assert own_scheduler.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("workers", [2, 3])
def test_simulated_workers_agree_and_learn(workers):
    model, optimizer, _ = plain()
    run = pl.simulate(attached, workers=workers)
    assert run.result["averages_per_step"] > 0.9
    for own, own_optimizer, scheduler in run.returned.values():
        assert keys(own, own_optimizer) == keys(model, optimizer)
        assert scheduler.last_epoch == 4
    weights = [own.state_dict()["0.weight"] for own, _, _ in run.returned.values()]
    assert all(torch.equal(weights[0], other) for other in weights[1:]), "all end with the mean"
    inputs, targets = make()[3].dataset.tensors
    with torch.no_grad():
        run.returned[0][0].train()
        accuracy = (run.returned[0][0](inputs).argmax(dim=1) == targets).float().mean()
    assert accuracy > 0.8
