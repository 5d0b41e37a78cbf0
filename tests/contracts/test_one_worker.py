"""One worker is plain PyTorch, bit for bit, whatever the algorithm."""

import functools

import pytest
import torch

from contracts.runs import plain_run, run_task
from contracts.table import HOLDERS, backends, rows

BATCH_SIZE, STEPS = 31, 50  # beyond the first epoch, whose 47th batch is shorter
OPTIMIZERS = {
    "sgd": {},
    "sgd(weight_decay=0.001)": {"momentum": 0.9, "learning_rate": 0.05},
    "sgd(nesterov=true)": {"momentum": 0.9, "learning_rate": 0.05},
    "adam": {"learning_rate": 0.002},
    "adamw(weight_decay=0.1)": {"learning_rate": 0.002},
    "rmsprop(centered=true)": {"momentum": 0.5, "learning_rate": 0.001},
    "adagrad(lr_decay=0.01)": {"learning_rate": 0.02},
}


def check_equal(run, parameters, optimizer):
    x, losses = plain(optimizer)
    assert run.result["outcome"] == "stopped", run.result["outcome_reason"]
    assert run.records[0]["loss"].tolist() == losses
    assert torch.equal(parameters.x, x)


@functools.cache
def plain(optimizer):
    return plain_run(optimizer, **settings(optimizer))


def settings(optimizer):
    return {"steps": STEPS, "batch_size": BATCH_SIZE, **OPTIMIZERS[optimizer]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@rows(lambda row: row.spec in HOLDERS)
def test_equals_plain_pytorch(row, optimizer):
    run, parameters = run_task(row, optimizer=optimizer, **settings(optimizer))
    check_equal(run, parameters, optimizer)


@backends(
    lambda row: not row.scales_fresh_updates and not row.own_rule and (row.scales_stale_updates or not row.policy)
)
def test_every_algorithm_equals_plain_pytorch(row, backend):
    optimizer = "sgd(weight_decay=0.001)"
    run, parameters = run_task(row, backend=backend, optimizer=optimizer, **settings(optimizer))
    check_equal(run, parameters, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd(weight_decay=0.001)", "adam"])
@rows(lambda row: row.is_default and not (row.algorithm.lockstep or row.algorithm.gossip or row.served))
def test_shared_optimizer_state_is_the_same(row, optimizer):
    run, parameters = run_task(row, optimizer=optimizer, optimizer_state="shared", **settings(optimizer))
    check_equal(run, parameters, optimizer)
