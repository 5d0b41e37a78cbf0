"""Trains a model in parts, which exchange tensors in memory, beside the model itself: no processes."""

import copy

import torch
from torch.nn import functional as F

import paceline as pl
from model_parallel.models import BATCH
from paceline.model_parallel.graph.in_threads import run_parts

STEPS = 3


def batches(steps=STEPS, size=BATCH):
    draw = torch.Generator().manual_seed(11)
    return [(torch.randn(size, 8, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(steps)]


def loop(called, model, data, before_step, loss_of):
    """Losses and gradients by step of `called`, a model or its part."""
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    seen = []
    for step, (x, y) in enumerate(data):
        before_step(model, step)
        optimizer.zero_grad()
        loss = loss_of(called(**x) if isinstance(x, dict) else called(x), y)
        loss.backward()
        seen.append((loss.detach(), {n: p.grad.clone() for n, p in called.named_parameters() if p.grad is not None}))
        optimizer.step()
    return seen


def compare(model, pins, workers=2, *, data=None, before_step=lambda model, step: None, loss_of=F.cross_entropy,
            close=torch.equal, all_busy=True, **options):  # fmt: skip
    """Places and trains it for some steps, and compares losses, gradients, parameters and buffers with the model's own."""
    data = data or batches()
    plan = pl.place(model, data[0][0], devices=workers, pins=pins, repeats=1, force=True, **options)
    assert len(set(plan.placement.device_of)) == workers or not all_busy
    plain, twins = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(workers)]
    expected = loop(plain, plain, data, before_step, loss_of)
    found = run_parts(plan, twins, lambda part: loop(part, part.whole, data, before_step, loss_of))
    for step, (loss, gradients) in enumerate(expected):
        assert all(close(one[step][0], loss) for one in found), f"loss of step {step}"
        seen = {name: gradient for one in found for name, gradient in one[step][1].items()}
        assert seen.keys() == gradients.keys(), f"step {step}"
        for name, gradient in gradients.items():
            assert close(seen[name], gradient), f"{name} in step {step}"
    states = [twin.state_dict() for twin in twins]
    for name, value in plain.state_dict().items():
        assert any(close(one[name], value) for one in states), name
    return plan


def nearly(one, other):
    """Equal up to sums that are ordered differently."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)
