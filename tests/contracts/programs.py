"""Training functions for worker processes: gradients that are known integers, so that every lost update would show."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import leftovers
import paceline as pl
from paceline.data.plan import BatchPlan

BATCH_SIZE, NUM_BATCHES = 2, 47  # which no number of workers divides


def planted(num_batches=NUM_BATCHES):
    """What each sample adds to every parameter."""
    return [(3 * sample + 1) % 11 - 4 for sample in range(BATCH_SIZE * num_batches)]


class Planted(nn.Module):
    """A 'model' whose gradient is -1 times the batch's mean, in every parameter alike, wherever the parameters are."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, values):
        return -(self.weight.sum() + self.bias.sum()) * values.mean()


@dataclass(frozen=True)
class AddUp:
    """Adds the sum of every batch to every parameter; a batch of two with learning rate 2 gives the sum, not the mean.

    With a folder as `meeting`, all workers have their first gradient before one of them makes a step.
    """

    size: int
    epochs: int = 1
    learning_rate: float = 2.0
    num_batches: int = NUM_BATCHES
    meeting: Path | None = None

    def __call__(self):
        model = Planted(self.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate)
        data = torch.utils.data.TensorDataset(torch.tensor(planted(self.num_batches), dtype=torch.float32))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        waits = self.meeting is not None
        with pl.attach(model, optimizer) as worker:
            for _ in range(self.epochs):
                for (values,) in worker.batches(loader):
                    optimizer.zero_grad()
                    model(values).backward()
                    if waits:
                        meet(self.meeting, worker)
                        waits = False
                    optimizer.step()


def meet(folder, worker):
    """Waits for all workers of the run to come here: a fast one would take all batches before the others begin."""
    (folder / f"here-{worker.worker_id}").touch()
    leftovers.wait_until(lambda: len(list(folder.glob("here-*"))) == worker.num_workers, "all workers")


def expected_sum(records, seed=0):
    """What the applied updates in the records must have added."""
    values = torch.tensor(planted())
    plan = BatchPlan(num_samples=len(values), batch_size=BATCH_SIZE, seed=seed)
    rows = [row for own in records.values() for row in own[own["applied_version"] > 0]]
    return sum(values[plan.indices(int(row["batch"]))].sum().item() for row in rows)
