"""A first step that begins inside `backward`, as the loop has called nothing of the model before it."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.func import functional_call

import paceline as pl

WORKERS, STEPS, LIMIT = 2, 3, 0.05
X = torch.randn(STEPS, WORKERS, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def by_weights(model, x):
    return nn.functional.linear(x, model.weight, model.bias)


def by_function(model, x):
    """Calls a copy of the model's module."""
    return functional_call(nn.Linear(4, 3, dtype=torch.float64), dict(model.named_parameters()), (x,))


def made():
    model = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def step(model, optimizer, x, forward):
    optimizer.zero_grad()
    forward(model, x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()


def found(forward, algorithm, backend, train=step):
    final, lock = {}, threading.Lock()

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in X:
                train(model, optimizer, x[worker.worker_id], forward)
        with lock:
            final[worker.worker_id] = [p.detach().clone() for p in model.parameters()]

    if backend == "simulator":
        pl.simulate(loop, workers=WORKERS, algorithm=algorithm)
    else:
        pl.launch(loop, workers=WORKERS, algorithm=algorithm, backend=backend)
    return final


@pytest.mark.parametrize("forward", [by_weights, by_function])
@pytest.mark.parametrize("backend", ["threads", "simulator"])
@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(bucket_bytes=1)"])
def test_a_clip_in_the_first_step_acts_on_the_mean(algorithm, backend, forward):
    model, optimizer = made()
    for x in X:
        step(model, optimizer, x.view(-1, 4), forward)
    expected = [p.detach() for p in model.parameters()]
    for parameters in found(forward, algorithm, backend).values():
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["threads", "simulator"])
@pytest.mark.parametrize("codec", ["sign", "qsgd(bits=4)", "power(rank=1, min_rate=1)"])
def test_a_clip_in_the_first_step_acts_on_the_coded_mean(codec, backend):
    norms = []

    def train(model, optimizer, x, forward):
        optimizer.zero_grad()
        forward(model, x).square().mean().backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()

    final = found(by_weights, f"all-reduce(codec={codec})", backend, train)
    assert all(torch.equal(a, b) for a, b in zip(final[0], final[1], strict=True))
    assert list(Counter(norms).values()) == [WORKERS] * STEPS


@pytest.mark.parametrize("backend", ["threads", "simulator"])
def test_a_clip_in_the_first_step_of_strips_is_refused(backend):
    with pytest.raises(pl.PacelineError, match="cannot clip or change gradients between backward and step"):
        found(by_weights, "all-reduce(sharded=true)", backend)


@pytest.mark.parametrize("algorithm", ["all-reduce", "all-reduce(codec=sign)", "all-reduce(sharded=true)"])
def test_a_loop_without_a_step_ends(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            pass

    with pytest.raises(pl.PacelineError, match="have ended without an update"):
        pl.simulate(loop, workers=WORKERS, algorithm=algorithm)
