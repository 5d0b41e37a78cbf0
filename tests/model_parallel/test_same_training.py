"""What forward may do: a placed model trains as the model itself does, bit for bit, or is refused by name."""

import sys
from collections import UserDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from model_parallel.in_memory import batches, compare
from model_parallel.models import TwoTowers

PINS = {"a": 0, "b": 1, "head": 0}
FACTOR = HALF = 0.5
LOG_FACTOR = torch.tensor(0.0)
MODES = [
    torch.no_grad,
    torch.inference_mode,
    partial(torch.set_grad_enabled, False),
    partial(torch.autocast, "cpu", torch.bfloat16),
]


def made(kind, *args):
    torch.manual_seed(3)
    return kind(*args)


class InAMode(TwoTowers):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        with self.mode():
            a = self.a(x)
        return self.head(torch.cat([a.float(), self.b(x)], 1))


class Decorated(TwoTowers):
    @torch.no_grad()
    def teacher(self, x):
        return self.a(x)

    def forward(self, x):
        return self.head(torch.cat([self.teacher(x), self.b(x)], 1))


class Nested(TwoTowers):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                a = self.a(x)
            with torch.no_grad():
                b = self.b(x)
                with torch.enable_grad():
                    c = self.a(x)  # autocast of PyTorch 2.8 would reuse b's weights, which are cast without gradients
        return self.head(torch.cat([a, b + c], 1))


class Averaged(TwoTowers):
    """A target network that follows the trained one inside forward."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.target(x)
            self.target.weight.lerp_(self.a[0].weight, 0.1)
        return self.head(torch.cat([self.a(x) - target, self.b(x)], 1))


@pytest.mark.parametrize("make", [*(partial(InAMode, mode) for mode in MODES), Decorated, Nested])
def test_operations_run_in_the_modes_of_forward(make):
    compare(made(make), PINS)


def test_a_target_network_that_forward_changes_without_gradients():
    compare(made(Averaged), {"a": 0, "target": 0, "b": 1, "head": 1})


class Copying(TwoTowers):
    """Copies a part of a weight to another layer, and sends it to the other worker, without gradients."""

    def __init__(self):
        super().__init__()
        self.copy = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.copy.weight[:4].copy_(0.5 * self.a[0].weight.chunk(2)[0])
            sent = self.a[0].weight.chunk(2)[1]
        return self.head(torch.cat([self.copy(self.a(x)), (self.b(x) @ sent.t()).repeat(1, 2)], 1))


def test_views_of_parameters_that_were_made_without_gradients():
    compare(made(Copying), {"a": 0, "copy": 0, "b": 1, "t": 1, "matmul": 1, "head": 0})


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Adversarial(TwoTowers):
    def forward(self, x):
        return self.head(torch.cat([Reversed.apply(self.a(x), 2.0), self.b(x)], 1))


def test_custom_autograd_functions_keep_their_own_gradient():
    compare(made(Adversarial), PINS)


@torch.fx.wrap
def reversed_and_doubled(x):
    return 2 * Reversed.apply(x, 2.0)


class Unread(TwoTowers):
    """A custom function's result that only operations without gradients read, and another that the loss leaves out."""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        with torch.no_grad():
            read = reversed_and_doubled(a.tanh()) + Reversed.apply(b, 2.0)
        return self.head(torch.cat([read, b], 1)), reversed_and_doubled(a), Reversed.apply(a, 2.0).sum()


@pytest.mark.parametrize("pins", [PINS, {"a": 1, "b": 0, "head": 0, "reversed_and_doubled": 0}], ids=["here", "there"])
def test_custom_autograd_functions_that_get_no_gradient_give_none(pins):
    compare(made(Unread), pins, loss_of=lambda out, y: F.cross_entropy(out[0], y))


class Added(TwoTowers):
    """Changes a value in place, and goes on with that value instead of the operation's result."""

    def forward(self, x):
        a = 2 * self.a(x)
        a.add_(self.b(x))
        return self.head(torch.cat([a, a.tanh()], 1))


def test_changes_in_place_have_gradients_although_no_operation_reads_their_result():
    compare(made(Added), {"a": 0, "b": 1, "head": 0})


class PartlyTrained(TwoTowers):
    """A tower that only operations without gradients read, and whose output the loss leaves out."""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        with torch.no_grad():
            read = a.tanh()
        return self.head(torch.cat([read, b], 1)), a


@pytest.mark.parametrize("head", [0, 1])
def test_hooks_of_parameters_without_a_gradient_are_not_called(head):
    def clamp(model, step):
        for one in model.parameters() if step == 0 else ():
            one.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    pins = {"a": 0, "b": 1, "head": head}
    compare(made(PartlyTrained), pins, before_step=clamp, loss_of=lambda out, y: F.cross_entropy(out[0], y))


@dataclass
class Settings:
    beta: float = 1.0


def half_of():
    return 2 * HALF


class Annealed(TwoTowers):
    shared = 1.0

    def helped(self):
        return (lambda: half_of())()

    def __init__(self, where):
        super().__init__()
        self.beta, self.betas, self.settings, self.where = 1.0, {"a": [1.0]}, Settings(), where
        self.log_beta = torch.tensor(0.0)

    def forward(self, x):
        factors = {
            "helper": self.helped(),
            "attribute": self.beta,
            "container": self.betas["a"][0],
            "object": self.settings.beta,
            "class": self.shared,
            "file": FACTOR,
            "tensor": self.log_beta.exp(),
            "file's tensor": LOG_FACTOR.exp(),
        }
        return self.head(torch.cat([self.a(x) * factors[self.where], self.b(x)], 1))


def anneal(where, monkeypatch, model, step):
    value = 1 + step  # an int, and a float
    if where == "attribute":
        model.beta = value
    elif where == "container":
        model.betas["a"][0] = value / 7
    elif where == "object":
        model.settings.beta = value / 7
    elif where == "class":
        monkeypatch.setattr(Annealed, "shared", 0.3)
    elif where == "helper":
        monkeypatch.setattr(sys.modules[__name__], "HALF", value / 7)
    elif where == "tensor":
        model.log_beta.sub_(0.1)
    elif where == "file's tensor":
        LOG_FACTOR.fill_(-0.1 * value)
    else:
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 0.7)


@pytest.mark.parametrize(
    "where", ["attribute", "container", "object", "class", "file", "helper", "tensor", "file's tensor"]
)
def test_numbers_that_the_loop_changes_are_followed(where, monkeypatch):
    compare(made(Annealed, where), PINS, before_step=partial(anneal, where, monkeypatch))


class Deepening(TwoTowers):
    depth = 1

    def forward(self, x):
        a = self.a(x)
        for _ in range(self.depth):
            a = self.a(a)
        return self.head(torch.cat([a, self.b(x)], 1))


class Cutting(TwoTowers):
    width = 8

    def forward(self, x):
        return self.head(F.pad(torch.cat([self.a(x), self.b(x)[:, : self.width]], 1), (0, 8 - self.width)))


class Viewing(TwoTowers):
    heads = 2

    def forward(self, x):
        h = torch.cat([self.a(x), self.b(x)], 1)
        return self.head(h.view(h.size(0), h.size(1) // self.heads, -1).flatten(1))


@pytest.mark.parametrize(
    ("kind", "name", "value", "pins"),
    [(Deepening, "depth", 2, {}), (Cutting, "width", 7, {"getitem": 1}), (Viewing, "heads", 4, {})],
)
def test_a_number_that_changes_operations_or_shapes_is_refused(kind, name, value, pins):
    def change(model, step):
        setattr(model, name, value if step else getattr(kind, name))

    with pytest.raises(pl.UsageError, match=rf"{name} has changed since|is now .* and its plan sends"):
        compare(made(kind), PINS | pins, before_step=change)


class Counting(TwoTowers):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Leaking(TwoTowers):
    def forward(self, x):
        self.features = self.a(x)
        return self.head(torch.cat([self.features, self.b(x)], 1))


class Caching(TwoTowers):
    cached = None

    def forward(self, x):
        if self.cached is None:
            self.cached = torch.arange(8.0)
        return self.head(torch.cat([self.a(x), self.b(x) + self.cached], 1))


@pytest.mark.parametrize(("kind", "name"), [(Counting, "calls"), (Leaking, "features")])
def test_a_forward_that_changes_its_module_is_refused(kind, name):
    with pytest.raises(pl.UsageError, match=rf"^forward of {kind.__name__} changes {name}, which a graph"):
        pl.place(made(kind), batches()[0][0], repeats=1, force=True)


def test_a_cache_that_the_first_call_fills_is_no_change():
    compare(made(Caching), PINS)
    plan = pl.place(made(Caching), batches()[0][0], devices=1, repeats=1, force=True)
    plan.part(made(Caching))  # as in a worker, which has not called it


class WithForces(TwoTowers):
    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.a(x).sum(), x, create_graph=True)
        return self.head(torch.cat([force, self.b(x)], 1))


def test_gradients_in_forward_are_refused_with_their_line():
    with pytest.raises(
        pl.UsageError, match=r"^forward of WithForces computes gradients \(test_same_training\.py:\d+\)"
    ):
        pl.place(made(WithForces), torch.randn(6, 8), pins=PINS, repeats=1, force=True)


class ChangesItsInput(TwoTowers):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        if self.change == "+=":
            x += 1
        elif self.change == "add_":
            x.add_(1)
        else:
            x = torch.relu_(x["x"] if self.change == "in a dict" else x[1][0])
        return super().forward(x)


@pytest.mark.parametrize("options", [{"pins": PINS}, {"objective": "throughput", "microbatches": 2}], ids=str)
@pytest.mark.parametrize(
    ("change", "example_of"),
    [
        ("+=", lambda x: x),
        ("add_", lambda x: {"x": x}),
        ("in a dict", lambda x: (UserDict(x=x),)),
        ("in tuples", lambda x: ((None, (x,)),)),
    ],
)
def test_a_forward_that_changes_its_input_is_refused_and_leaves_the_example_as_it_was(change, example_of, options):
    x = torch.randn(6, 8)
    before, model = x.clone(), made(ChangesItsInput, change)
    with pytest.raises(
        pl.UsageError, match=r"^forward of ChangesItsInput changes its input x in place, while the loop"
    ):
        pl.place(model, example_of(x), repeats=1, force=True, **options)
    assert torch.equal(x, before)
    assert x._version == 0


def test_planning_gives_an_example_no_gradient():
    x = torch.randn(6, 8, requires_grad=True)
    pl.place(made(TwoTowers), x, devices=1, repeats=1, force=True)
    assert x.grad is None


class Hooked(TwoTowers):
    def __init__(self, where):
        super().__init__()
        if where == "whole":
            self.register_forward_hook(lambda module, args, out: 2 * out)
        else:
            self.inner = Decorated()
            self.inner.register_full_backward_hook(lambda module, found, given: found)

    def forward(self, x):
        return self.inner(x) if hasattr(self, "inner") else super().forward(x)


@pytest.mark.parametrize(("where", "says"), [("whole", "Hooked has hooks"), ("inner", "inner has a backward hook")])
def test_hooks_that_a_graph_would_not_call_are_refused(where, says):
    with pytest.raises(pl.UsageError, match=says):
        pl.place(made(Hooked, where), batches()[0][0], repeats=1, force=True)


class Functional(TwoTowers):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=self.training)


def test_evaluation_of_a_part_is_refused_where_keywords_depend_on_the_mode():
    plan = pl.place(made(Functional), x := batches()[0][0], devices=1, repeats=1, force=True)
    with pytest.raises(pl.UsageError, match="computes a different result in evaluation mode"):
        plan.part(made(Functional)).eval()(x)


def test_modules_that_the_loop_keeps_in_evaluation_mode_stay_in_it():
    model = made(TwoTowers).train()
    model.b.eval()
    pl.place(model, batches()[0][0], devices=1, repeats=1, force=True).part(model)
    assert model.training
    assert not model.b.training
