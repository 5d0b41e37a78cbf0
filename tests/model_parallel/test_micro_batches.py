"""Micro-batches train as their batch does, or are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from model_parallel.in_memory import STEPS, compare, nearly
from model_parallel.models import BATCH, Normed, TwoTowers

PINS = {"a": 0, "b": 1, "head": 0}
THREE = {"objective": "throughput", "microbatches": 3, "close": nearly}


class Summed(TwoTowers):
    def forward(self, x):
        return super().forward(x).square().sum()


class Centred(TwoTowers):
    def forward(self, x):
        y = F.dropout(super().forward(x), 0.1, self.training)
        return y - y.mean(0)


class WithoutBuffers(TwoTowers):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x):
        return super().forward(self.norm(x))


class DetachedMean(TwoTowers):
    """Its outputs are those of single samples, but its gradients are not."""

    def forward(self, x):
        y = super().forward(x)
        return y * 1.0 + (y.mean(0) - y.mean(0).detach())


class Noisy(TwoTowers):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


CHANGED = "computes a different result from a batch than from its micro-batches"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        *((one, CHANGED) for one in (Summed, Centred, Normed, WithoutBuffers, DetachedMean)),
        (Noisy, r"draws random numbers in evaluation mode, too \(test_micro_batches.py:\d+\)"),
    ],
)
def test_models_whose_results_would_change_are_refused(kind, says):
    with pytest.raises(pl.UsageError, match=rf"^{kind.__name__} {says}"):
        pl.place(kind(), torch.randn(BATCH, 8), repeats=1, force=True, objective="throughput", microbatches=3)


class Attended(TwoTowers):
    """The keys' bias moves no output, so its gradient is what rounding leaves of zero."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(8, 8)

    def forward(self, x):
        tokens = x.view(-1, 2, 4).repeat(1, 1, 2)
        attended = F.scaled_dot_product_attention(tokens, self.keys(tokens), tokens)
        return super().forward(attended.mean(1))


def test_a_gradient_that_is_zero_but_for_rounding_refuses_no_micro_batches():
    plan = pl.place(Attended(), torch.randn(BATCH, 8), repeats=1, force=True, objective="throughput", microbatches=3)
    assert plan.problem.microbatches == 3


def test_dropout_and_a_mean_in_the_model_are_the_same():
    class Mean(TwoTowers):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.1, self.training).square().mean()

    plan = pl.place(Mean(), torch.randn(BATCH, 8), repeats=1, force=True, objective="throughput", microbatches=3)
    assert plan.problem.microbatches == 3


def test_outputs_that_are_no_tensors_stay_as_they_are():
    class Named(TwoTowers):
        def forward(self, x):
            return {"scores": super().forward(x), "attention": None, "heads": 2}

    compare(Named(), PINS, loss_of=lambda out, y: F.cross_entropy(out["scores"], y) * out["heads"], **THREE)


class WithTable(TwoTowers):
    """Each row meets all rows of a table, and a scale that has no rows."""

    def forward(self, x, table, scale):
        return super().forward(x + (x @ table.t()).softmax(1) @ table * scale)


@pytest.mark.parametrize("rows", [4, BATCH], ids=["shorter", "as long as the batch"])
def test_inputs_without_samples_in_their_rows_stay_whole(rows):
    torch.manual_seed(2)
    data = [
        ({"x": torch.randn(BATCH, 8), "table": torch.randn(rows, 8), "scale": torch.rand(8)}, torch.arange(BATCH) % 3)
        for _ in range(STEPS)
    ]
    plan = compare(WithTable(), PINS, data=data, **THREE)
    assert plan.cut == (True, False, False)
    with pytest.raises(pl.UsageError, match=rf"inputs, \[6, 8\] of float32, \[{rows}, 8\]"):
        pl.place(WithTable(), data[0][0], devices=1, repeats=1, force=True).part(WithTable())(
            **data[0][0] | {"table": torch.randn(3, 8)}
        )


def test_all_samples_are_cut():
    assert compare(TwoTowers(), PINS, **THREE).cut == (True,)
