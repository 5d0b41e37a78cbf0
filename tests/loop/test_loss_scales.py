"""By what GradScaler has scaled a loss, as seen in its backward pass."""

import pytest
import torch

from paceline.loop.loss_scales import scale_of_pass, watch_scales


@pytest.fixture(name="found")
def _found():
    """What `scale_of_pass` says whenever the parameter gets a gradient."""
    return []


@pytest.fixture(name="parameter")
def _parameter(found):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda _: found.append(scale_of_pass()))
    return parameter


@pytest.fixture(name="scaler")
def _scaler():
    undo = watch_scales()
    yield torch.amp.GradScaler("cpu", init_scale=8.0)
    undo()
    assert torch.amp.GradScaler.scale.__module__ == "torch.amp.grad_scaler"


def test_a_pass_knows_the_scale_of_its_own_loss(scaler, parameter, found):
    """A loss that is scaled for a later pass says nothing of this one."""
    scaler.scale(parameter.sum()).backward()
    scaler.update(4.0)
    early = scaler.scale(parameter.sum())
    parameter.sum().backward()
    early.backward()
    assert found == [8.0, None, 4.0]
    assert scale_of_pass() is None


def test_a_pass_that_raises_says_nothing_of_the_next_one(scaler, parameter, found):
    """It left its scale behind: under all-reduce(sharded=true), later updates of the same thread were divided by it."""

    def fail(_):
        raise MemoryError("no room")

    lost = parameter * 1.0
    lost.register_hook(fail)
    with pytest.raises(MemoryError):
        scaler.scale(lost.sum()).backward()
    assert scale_of_pass() is None
    parameter.sum().backward()
    assert found == [None]


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_several_losses(scaler, parameter, found, kind):
    losses = list(scaler.scale(kind([parameter.sum(), parameter.square().sum()])))
    torch.autograd.backward(losses)
    assert found == [8.0]
    assert parameter.grad.tolist() == [24.0, 24.0]


def test_a_disabled_scaler_scales_nothing(scaler, parameter, found):
    torch.amp.GradScaler("cpu", enabled=False).scale(parameter.sum()).backward()
    assert found == [None]


def test_what_needs_no_gradient_is_scaled_as_before(scaler):
    assert scaler.scale(torch.tensor(3.0)) == 24.0


def test_several_may_watch(scaler, parameter, found):
    watch_scales()()
    scaler.scale(parameter.sum()).backward()
    assert found == [8.0]
