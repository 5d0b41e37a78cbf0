"""Gradients are the whole batch's: controls that must fail without the sums, accumulation, copies, clipping."""

import copy

import pytest
import torch
import torch.utils.checkpoint

from model_parallel.tensor.model import OPTIMIZERS, assert_equal, built, data, trained
from model_parallel.tensor.threads import on_each
from paceline.errors import UsageError
from paceline.model_parallel.axes import Axis
from paceline.model_parallel.tensor import state
from paceline.model_parallel.tensor.mesh import Mesh
from paceline.model_parallel.tensor.shapes import Grid, Line

ALONE = Line(1)


class Silent:
    """An axis whose gradients nobody adds up, as in the published code's depth."""

    def __init__(self, axis):
        self.axis, self.size, self.index = axis, axis.size, axis.index
        self.left_out = 0

    def start_all_reduce(self, x):
        self.left_out += 1
        return Axis().start_all_reduce(x)


@pytest.mark.parametrize("axis", ["depth", "row"])
def test_without_the_sum_over_an_axis_parameters_are_wrong_and_the_first_loss_is_right(axis):
    def program(mesh):
        mesh.gradients._axes = {**mesh.axes, axis: Silent(mesh.axes[axis])}
        found = trained(mesh)
        assert mesh.gradients._axes[axis].left_out
        return found

    expected = trained(Mesh.open(ALONE))
    for found in on_each(Grid(2, 2), program):
        assert_equal(([(*found[0][0][:2], None)], {}), ([expected[0][0]], {}))
        with pytest.raises(AssertionError, match="not close"):
            assert_equal((found[0][:0], found[1]), (expected[0][:0], expected[1]))


def gradients(mesh, passes, copied=False):
    """After so many backward passes, whole; the parameters' names first."""
    model = built(mesh)
    if copied:
        model = copy.deepcopy(model)
    for step in range(passes):
        tokens, following, more = (mesh.local_batch(one) for one in data(step))
        model(tokens, following, mesh.local_features(more)).backward()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.grad)
    return state.full_state_dict(model)


@pytest.mark.parametrize("copied", [False, True])
def test_gradients_accumulate_and_copies_have_them_too(copied):
    expected = gradients(Mesh.open(ALONE), 3)
    for found in on_each(Grid(2, 2), lambda mesh: gradients(mesh, 3, copied), bucket_bytes=2000):
        assert_equal(([], found), ([], expected))


@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_a_backward_pass_that_has_failed_leaves_nothing_behind(bucket_bytes):
    """Though the gradients of some parameters have left in buckets before."""

    def program(mesh):
        model = built(mesh)
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        handle = model.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(tokens, following, mesh.local_features(more).clone().requires_grad_()).backward()
        handle.remove()
        model.zero_grad()
        model(tokens, following, mesh.local_features(more)).backward()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(one.grad)
        return state.full_state_dict(model)

    expected = gradients(Mesh.open(ALONE), 1)
    for found in on_each(Grid(2, 2), program, bucket_bytes=bucket_bytes):
        assert_equal(([], found), ([], expected))


def test_another_loss_after_a_backward_pass_that_has_failed_gets_all_its_gradients():
    """It begins with parameters that the failed pass has not met, and goes on with one that it has."""

    def program(mesh, fails):
        model, other = built(mesh, dropout=0.0), built(mesh, dropout=0.0)
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        more = mesh.local_features(more)
        watched = more.clone().requires_grad_()
        watched.register_hook(fail)
        failing = model(tokens, following, watched)
        later = model(tokens, following, more) + other(tokens, following, more)  # whose backward begins with the other
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                failing.backward()
            model.zero_grad()
        later.backward()
        with torch.no_grad():
            for one in (*model.parameters(), *other.parameters()):
                one.copy_(one.grad)
        return {number: state.full_state_dict(one) for number, one in enumerate((model, other))}

    expected = program(Mesh.open(ALONE), False)
    for found in on_each(Grid(2, 2), lambda mesh: program(mesh, True)):
        for number, one in expected.items():
            mine = {name: value for name, value in found[number].items() if not name.endswith("calls")}
            assert_equal(([], mine), ([], {name: one[name] for name in mine}))


@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints_whose_passes_are_within_the_pass(use_reentrant, bucket_bytes):
    def program(mesh):
        model = built(mesh, dropout=0.0)
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        more = mesh.local_features(more).clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, tokens, following, more, use_reentrant=use_reentrant).backward()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(one.grad)
        return state.full_state_dict(model)

    expected = gradients(Mesh.open(ALONE), 1)
    for found in on_each(Grid(2, 2), program, bucket_bytes=bucket_bytes):
        assert_equal(([], found), ([], expected))


def fail(*_):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("has_gradients", [False, True])
def test_gradients_that_go_elsewhere_are_refused(has_gradients):
    def program(mesh):
        model = built(mesh)
        for one in model.parameters() if has_gradients else ():
            one.grad = torch.ones_like(one)
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        loss = model(tokens, following, mesh.local_features(more))
        with pytest.raises(UsageError, match=r"call loss\.backward\(\), and take the gradients"):
            torch.autograd.grad(loss, list(model.parameters()))
        assert all((one.grad is not None) is has_gradients for one in model.parameters())
        assert not has_gradients or all(bool((one.grad == 1).all()) for one in model.parameters())

    on_each(Grid(1, 2), program)


@pytest.mark.parametrize("shape", [Line(3), Grid(2, 2), Grid(1, 2)], ids=str)
def test_clipping_counts_every_parameter_once(shape):
    plain = built(Mesh.open(ALONE), is_tied=False)
    plain(*data(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert norm > 0.5, "there is something to clip"

    def program(mesh):
        return trained(mesh, "momentum", max_norm=0.5, is_tied=False)

    expected = program(Mesh.open(ALONE))
    torch.testing.assert_close(expected[0][0][2], norm, rtol=0, atol=1e-12)
    for found in on_each(shape, program):
        assert_equal(found, expected)


def test_frozen_parameters_stay():
    def program(mesh):
        model = built(mesh)
        model.token.weight.requires_grad_(False)
        one = OPTIMIZERS["momentum"]([one for one in model.parameters() if one.requires_grad])
        before = model.token.weight.clone()
        tokens, following, more = (mesh.local_batch(one) for one in data(0))
        model(tokens, following, mesh.local_features(more)).backward()
        one.step()
        assert model.token.weight.grad is None
        assert torch.equal(model.token.weight, before)

    on_each(Grid(2), program)
