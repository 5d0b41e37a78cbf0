"""The user's loop under `all-reduce` with a codec: several backward passes before one step."""

import threading
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.compression.coded_mean import CodedMean

ROWS, COLUMNS, STEPS, PASSES, WORKERS = 16, 24, 6, 3, 2
GRADIENTS = torch.randn(STEPS * PASSES * WORKERS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).double()


def trained(codec, *, marked):
    """How far the weights have moved at rate 1, by worker, and what remembers; each batch's gradient is one of GRADIENTS."""
    moved, made, lock = {}, {}, threading.Lock()

    class Noted(CodedMean):
        def __init__(self, codec, ports, *others):
            super().__init__(codec, ports, *others)
            made[ports.worker_id] = self

    def loop():
        model = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            begun = model.weight.detach().clone()
            for number, gradient in enumerate(worker.batches(list(GRADIENTS)), start=1):
                loss = (model.weight * gradient).sum()
                if marked and number % PASSES:
                    with worker.accumulate():
                        loss.backward()
                else:
                    loss.backward()
                if number % PASSES == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            end = model.weight.detach().clone()
        with lock:
            moved[worker.worker_id] = begun - end

    with mock.patch("paceline.algorithms.coded_gradient.CodedMean", Noted):
        pl.launch(loop, workers=WORKERS, algorithm=f"all-reduce(codec={codec})", backend="threads")
    return [moved[worker] for worker in range(WORKERS)], [made[worker] for worker in range(WORKERS)]


def kept_back(means):
    """What all workers' memories lack of the mean, (ROWS, COLUMNS)."""
    slots = [mean.slots[0].state() for mean in means]
    left = sum(slot["memory"] for slot in slots) / WORKERS
    if "second" in slots[0]:
        left = left + torch.cat([slot["second"] for slot in slots])
    (begin, end), *_ = means[0].ranges
    return left[begin:end].view(ROWS, COLUMNS)


@pytest.mark.parametrize("codec", ["sign", "power(rank=2, warmup_steps=2)", "bf16(feedback=true)"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
def test_updates_and_what_is_kept_back_are_all_gradients(codec, marked):
    moved, means = trained(codec, marked=marked)
    assert torch.equal(moved[0], moved[1])
    left = kept_back(means)
    torch.testing.assert_close(moved[0] + left, GRADIENTS.sum(0) / WORKERS, rtol=1e-9, atol=1e-9)
    assert left.abs().max() > 1e-4, "nothing was rounded"
    assert [mean.slots[0].state()["count"] for mean in means] == [STEPS * (1 if marked else PASSES)] * WORKERS


def test_marked_passes_are_rounded_once_and_cost_as_many_bytes_as_one():
    errors, sent = {}, {}
    for marked in (True, False):
        moved, means = trained("qsgd(bits=4)", marked=marked)
        errors[marked] = (moved[0] - GRADIENTS.sum(0) / WORKERS).square().mean().item()
        sent[marked] = means[0].counts.coded_bytes
    assert PASSES * sent[True] == sent[False]
    assert 0 < 1.5 * errors[True] < errors[False]


@pytest.mark.parametrize("codec", ["sign", "power(rank=2, warmup_steps=0)"])
def test_coding_under_autocast_is_as_exact_as_without(codec):
    def trained_in(context):
        def loop():
            model = nn.Linear(COLUMNS, ROWS, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with pl.attach(model, optimizer) as worker:
                for gradient in worker.batches(list(GRADIENTS.float())):
                    optimizer.zero_grad()
                    with context():
                        (model.weight * gradient).sum().backward()
                    optimizer.step()
            return model.weight.detach()

        return pl.simulate(loop, workers=WORKERS, algorithm=f"all-reduce(codec={codec})").returned[0]

    assert torch.equal(trained_in(partial(torch.autocast, "cpu", dtype=torch.bfloat16)), trained_in(nullcontext))
