"""A model, or an optimizer, that is made outside the function: where workers share a process, they would share it."""

import threading

import pytest
import torch
from torch import nn

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made

SAYS = "share one model, as it was made outside the function .*: make the model and the optimizer inside the function"


def loop_with(make):
    def loop():
        model, optimizer = make()
        with pl.attach(model, optimizer) as worker:
            for x in worker.batches(batches(6, worker=0)):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    return loop


def both():
    one = made()
    return lambda: one


def model_only():
    model, _ = made()
    return lambda: (model, torch.optim.SGD(model.parameters(), lr=0.1))


def a_part():
    part = nn.Linear(6, 3)

    def make():
        model, _ = made()
        model.encoder = part
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return make


def optimizer_only():
    _, optimizer = made()

    def make():
        own, _ = made()
        return own, optimizer

    return make


STARTS = {
    "simulated": lambda loop, algorithm: pl.simulate(loop, workers=3, algorithm=algorithm),
    "threads": lambda loop, algorithm: pl.launch(loop, workers=2, algorithm=algorithm, backend="threads"),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("algorithm", families.ALL)
def test_a_model_at_module_level(algorithm, start):
    with pytest.raises(pl.UsageError, match=SAYS):
        STARTS[start](loop_with(both()), algorithm)


@pytest.mark.parametrize("outside", [model_only, a_part])
@pytest.mark.parametrize("start", STARTS)
def test_parts_of_it(outside, start):
    with pytest.raises(pl.UsageError, match=SAYS):
        STARTS[start](loop_with(outside()), "hogwild")


@pytest.mark.parametrize("start", STARTS)
def test_an_optimizer_of_another_model(start):
    """Of two threads, the one that comes while the other has the optimizer may be the first to fail."""
    says = r"none of the parameters .*: make the model and the optimizer inside the function"
    with pytest.raises(pl.UsageError, match=rf"{says}|{SAYS}" if start == "threads" else says):
        STARTS[start](loop_with(optimizer_only()), "hogwild")


def test_what_is_not_trained_may_be_shared():
    frozen = nn.Linear(6, 6).requires_grad_(False)

    def loop():
        model, optimizer = made()
        with pl.attach(nn.Sequential(frozen, model), optimizer) as worker:
            for x in worker.batches(batches(6, worker=0)):
                optimizer.zero_grad()
                loss_of(model, frozen(x)).backward()
                optimizer.step()

    assert pl.simulate(loop, workers=2, algorithm="lockstep").result["outcome"] == "stopped"


@pytest.mark.parametrize("start", STARTS)
def test_what_was_refused_can_be_used_again(start):
    model, optimizer = made()
    for _ in range(2):
        with pytest.raises(pl.UsageError, match="The workers share"):
            STARTS[start](loop_with(lambda: (model, optimizer)), "hogwild")
        loop_with(lambda: (model, optimizer))()  # alone


def test_twice_at_once_alone():
    model, optimizer = made()
    spec = "sequential(delay=constant(updates_late=1))"
    with pl.attach(model, optimizer, spec):
        with pytest.raises(pl.UsageError, match="inside another attach already"), pl.attach(model, optimizer, spec):
            pass
        with pl.attach(*made(), spec):  # another model
            assert threading.active_count()
    with pl.attach(model, optimizer, spec):
        pass
