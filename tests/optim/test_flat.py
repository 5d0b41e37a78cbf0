import pytest
import torch
from torch import nn

import paceline as pl
from paceline.optim.flat import FlatBinding


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (1,), (2, 2, 2), ())]


def test_parameters_begin_on_lines_and_padding_is_zero():
    binding = FlatBinding(parameters())
    x = torch.full((binding.num_elements,), 7.0)
    binding.read(x)
    assert (binding.num_parameters, binding.num_elements) == (15 + 1 + 8 + 1, 80)
    assert [view.data_ptr() % 64 for view in binding.views(x)] == [x.data_ptr() % 64] * 4
    padding = torch.ones(80, dtype=torch.bool)
    for begin, length in ((16, 15), (32, 1), (48, 8), (64, 1)):
        padding[begin : begin + length] = False
    assert (x[padding] == 0).all()


def test_bound_parameters_are_views_and_released_ones_are_not():
    ours = parameters()
    values = [p.detach().clone() for p in ours]
    binding = FlatBinding(ours)
    x = torch.empty(binding.num_elements)
    binding.read(x)
    binding.bind(x)
    assert all(torch.equal(p, value) for p, value in zip(ours, values, strict=True))
    x.add_(1)
    assert all(torch.equal(p, value + 1) for p, value in zip(ours, values, strict=True))
    binding.release()
    x.zero_()
    assert all(torch.equal(p, value + 1) for p, value in zip(ours, values, strict=True))
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in ours)


def test_bind_moves_between_vectors():
    ours = parameters()
    binding = FlatBinding(ours)
    one, other = torch.ones(binding.num_elements), torch.zeros(binding.num_elements)
    for x, value in ((one, 1), (other, 0), (one, 1)):
        binding.bind(x)
        assert all((p == value).all() for p in ours)


def test_gradients_go_in_and_out():
    ours = parameters()
    binding = FlatBinding(ours)
    for number, p in enumerate(ours[:-1]):
        p.grad = torch.full_like(p, number + 1.0)
    g = torch.full((binding.num_elements,), 9.0)  # padding, too, which nobody asks for here
    last = binding.ranges[-1:]
    assert binding.gather_gradients(g) == binding.missing_gradients() == last
    assert [view.unique().tolist() for view in binding.views(g)] == [[1.0], [2.0], [3.0], [0.0]]
    own = [p.grad for p in ours]
    binding.scatter_gradients(g * 2, missing=last)
    assert [p.grad is one for p, one in zip(ours, own, strict=True)] == [True] * 4
    assert ours[2].grad.unique().tolist() == [6.0]
    assert ours[3].grad is None
    binding.scatter_gradients(g * 2)
    assert ours[3].grad.tolist() == 0.0
    binding.bind_gradients(g, missing=binding.ranges[1:3])
    assert [p.grad is None for p in ours] == [False, True, True, False]


def test_a_worker_without_a_batch_has_a_gradient_of_zeros():
    binding = FlatBinding([nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2))])
    g = binding.zeros()
    for view in binding.views(g):
        view.fill_(1.0)
    binding.gather_gradients(g)
    assert not g.any()


def test_backward_adds_straight_into_bound_gradients():
    ours = parameters()
    binding = FlatBinding(ours)
    g = torch.zeros(binding.num_elements)
    binding.bind_gradients(g)
    sum((p * 3).sum() for p in ours).backward()
    assert g.sum() == 3 * binding.num_parameters


@pytest.mark.parametrize(
    "weight",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(20.0).reshape(4, 5)[:, ::2],
    ],
    ids=["transposed", "channels last", "with gaps"],
)
def test_layouts_other_than_rows(weight):
    """Dense ones are kept, since sums run in their order; others become rows, as PyTorch's own copies do."""
    parameter = nn.Parameter(weight)
    before, stride = weight.clone(), weight.clone().stride()
    binding = FlatBinding([parameter])
    x = torch.empty(binding.num_elements)
    binding.read(x)
    binding.bind(x)
    assert parameter.stride() == stride
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no parameters"),
        ([nn.Parameter(torch.zeros(1), requires_grad=False)], "no parameters"),
        ([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))], "one floating-point type"),
        (
            [nn.Parameter(torch.zeros(1, dtype=torch.complex64))],
            "complex64 on cpu; keep complex ones as torch.view_as_real",
        ),
        ([nn.Parameter(torch.zeros(1, device="meta"))], "CPU"),
        ([nn.UninitializedParameter()], "have no shape yet: call the model with a first batch"),
    ],
)
def test_what_cannot_be_flat(bad, message):
    with pytest.raises(pl.UsageError, match=message):
        FlatBinding(bad)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32])
def test_the_first_and_the_last_element_are_padding(size):
    binding = FlatBinding([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(size))])
    x = torch.full((binding.num_elements,), 7.0)
    binding.read(x)
    assert x[0] == x[-1] == 0
    assert x.sum() == 3 + size


def test_gradients_that_are_views_already_are_gathered_as_they_are():
    ours = parameters()
    binding = FlatBinding(ours)
    g = binding.zeros()
    binding.bind_gradients(g, missing=binding.ranges[1:2])
    for p in ours[:1] + ours[2:]:
        p.grad.fill_(3.0)
    assert binding.gather_gradients(g) == binding.ranges[1:2]
    assert [view.unique().tolist() for view in binding.views(g)] == [[3.0], [0.0], [3.0], [3.0]]
