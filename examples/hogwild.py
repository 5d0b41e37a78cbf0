"""Hogwild!: all workers read and write one shared vector at the same time, without any lock.

    python examples/hogwild.py [EPOCHS]

Momentum is kept by each worker for itself. How stale a gradient is follows from the number of workers: about one
update less than there are workers. On more workers, `step_size=pl.InverseStep()` makes stale gradients count less.
"""

import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def train() -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f}", flush=True)


if __name__ == "__main__":
    result = pl.launch(train, workers=2, algorithm=pl.Hogwild(reads="live")).result
    stale = result["staleness"]
    print(f"{result['steps']} updates in {result['wall_s']:.2f} s, {result['samples_per_s']:,.0f} samples/s")
    print(f"staleness: {stale['mean']:.2f} on average, {stale['p95']:g} at the 95th percentile")
    for staleness, updates in list(stale["histogram"].items())[:6]:
        print(f"  {staleness}: {updates:5d} {'#' * round(50 * updates / result['steps'])}")
