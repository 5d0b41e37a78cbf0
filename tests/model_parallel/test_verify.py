"""A plan is offered only if a step of its parts is the model's own; otherwise the first operation that differs is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

import paceline as pl
from model_parallel.models import BATCH, TwoTowers
from paceline.model_parallel.graph.exchange import Exchange
from paceline.model_parallel.graph.gradients import Give

X = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(4))
PINS = {"a": 0, "b": 1, "head": 0}


def place(kind, **options):
    torch.manual_seed(1)
    return pl.place(kind(), X, pins=PINS, repeats=1, force=True, **options)


def line_with(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# {text}" in line)


class AsksForKind(TwoTowers):
    def forward(self, x):
        y = self.a(x)
        if isinstance(y, torch.Tensor):
            y = y * 2
        y = y + 1  # after the difference
        return self.head(torch.cat([y, self.b(x)], 1))


class AsksForGradient(TwoTowers):
    """As in code that detaches only what has a gradient, which a value of torch.fx never has."""

    def forward(self, x):
        y = self.a(x)
        y = y.detach() if y.requires_grad is True else y
        y = y * 3  # without a gradient
        return self.head(torch.cat([y, self.b(x)], 1))


@pytest.mark.parametrize(
    ("kind", "operation", "line"),
    [(AsksForKind, "add", "after the difference"), (AsksForGradient, "mul", "without a gradient")],
)
def test_a_graph_that_is_not_the_models_is_refused_with_the_first_operation(kind, operation, line):
    words = (
        rf"of {kind.__name__} computes a different result .* first at {operation} \(test_verify.py:{line_with(line)}\)"
    )
    with pytest.raises(pl.UsageError, match=words):
        place(kind)


def test_a_value_that_changes_on_the_way_is_named(monkeypatch):
    send = Exchange.send
    monkeypatch.setattr(
        Exchange, "send", lambda self, to, kind, n, x, t: send(self, to, kind, n, x * 2 if kind == "move" else x, t)
    )
    with pytest.raises(pl.UsageError, match=r"^The parts of TwoTowers compute .*, first at cat \(models.py:\d+\)"):
        place(TwoTowers)


def test_a_gradient_that_changes_on_the_way_is_named(monkeypatch):
    backward = Give.backward
    monkeypatch.setattr(
        Give, "backward", staticmethod(lambda ctx, *g: backward(ctx, *(None if one is None else one * 2 for one in g)))
    )
    with pytest.raises(pl.UsageError, match=r"first at the gradient of b_1 \("):
        place(TwoTowers)


class Unsteady(TwoTowers):
    """Draws from a generator that PyTorch does not know."""

    def forward(self, x):
        return super().forward(x) * draw(x)


@torch.fx.wrap
def draw(x):
    return np.random.default_rng().random()


def test_a_model_that_differs_from_itself_is_offered_unverified():
    plan = place(Unsteady)
    assert not plan.is_verified
    assert "Verified" not in plan.explain()


class Interleaved(TwoTowers):
    """Draws for one tower, for the other, and for the first again."""

    def __init__(self):
        super().__init__()
        self.drops = torch.nn.ModuleList(torch.nn.Dropout(0.5) for _ in range(3))

    def forward(self, x):
        first, second, third = self.drops
        a, b = first(self.a(x)), second(self.b(x))
        return self.head(torch.cat([third(a), b], 1))


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_random_numbers_are_the_models_where_towers_draw_in_turn(mode):
    model = Interleaved().train(mode)
    assert pl.place(model, X, pins=PINS, repeats=1, force=True).is_verified
    assert model.training == model.drops[0].training == mode


class SparseRows(TwoTowers):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(5, 8, sparse=True)

    def forward(self, x):
        return super().forward(x + self.rows((x[:, 0] > 0).long())), torch.view_as_complex(x.view(-1, 4, 2))


def test_sparse_gradients_and_complex_outputs_are_compared():
    assert place(SparseRows).is_verified


@pytest.mark.parametrize("options", [{}, {"devices": 1}, {"objective": "throughput", "microbatches": 3}], ids=str)
def test_plans_say_that_they_are_verified_until_they_are_changed(options):
    plan = pl.place(TwoTowers(), X, repeats=1, force=True, **options)
    assert plan.is_verified
    assert "Verified: on the example" in plan.explain()
    assert not plan.again(placer="all-on-one").is_verified
