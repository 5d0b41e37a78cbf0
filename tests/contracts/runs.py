"""Runs for the contracts: small, with a fixed seed, and their final parameters at hand."""

from unittest import mock

import torch

import paceline as pl
from paceline.optim.flat import FlatBinding
from paceline.run.config import TrainConfig
from paceline.run.supervisor import Supervisor
from paceline.run.train import prepared
from paceline.specs.registry import build_optimizer
from paceline.tasks.load import load_task


def run_task(row, *, out=None, resume=None, **settings):
    """Trains the digits through the same door as `train`; returns the run and its final parameters (P,)."""
    config = TrainConfig(algorithm=row.spec, **{"backend": "threads", "workers": 1, **settings})
    training = prepared(config, out, resume)
    run = training.run()
    return run, training.supervisor.parameters(0)


def run_function(train, **settings):
    """`launch`, with the final parameters (P,)."""
    kept = []

    class Kept(Supervisor):
        def run(self):
            kept.append(self)
            super().run()

    with mock.patch("paceline.run.driver.Supervisor", Kept):
        run = pl.launch(train, **settings)
    return run, kept[0].parameters(0)


def plain_run(
    optimizer="sgd", *, steps, learning_rate=0.1, momentum=None, batch_size=8, seed=0, batches_per_step=1, later=None
):
    """The same training as a hand-written loop: torch's own step over each parameter, one batch after the other.

    With `batches_per_step`, a step's batch is that many consecutive ones of an epoch, as lockstep rounds take them; with
    `later=(step, rate)` the learning rate changes before that step.
    """
    from paceline.data.plan import BatchPlan

    task = load_task("digits-mlp")
    inputs, targets = task.load()[0].tensors
    torch.manual_seed(0)
    model = task.model()
    optimizer = build_optimizer(optimizer, list(model.parameters()), learning_rate, momentum)
    plan = BatchPlan(num_samples=len(inputs), batch_size=batch_size)
    numbers = [
        list(range(first, min(first + batches_per_step, epoch_end)))
        for epoch_end in range(plan.batches_per_epoch, (steps + 1) * plan.batches_per_epoch, plan.batches_per_epoch)
        for first in range(epoch_end - plan.batches_per_epoch, epoch_end, batches_per_step)
    ]
    losses = []
    for step, batch in enumerate(numbers[:steps]):
        if later is not None and step == later[0]:
            optimizer.param_groups[0]["lr"] = later[1]
        indices = torch.cat([plan.indices(number) for number in batch])
        optimizer.zero_grad()
        loss = task.loss(model(inputs[indices]), targets[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return flat(model), losses


def flat(model):
    binding = FlatBinding(model.parameters())
    x = torch.empty(binding.num_elements)
    binding.read(x)
    return x
