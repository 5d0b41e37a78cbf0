"""All-reduce: every worker applies the mean of all gradients, which travel while backward still computes.

    python examples/all_reduce.py [EPOCHS]
    torchrun --standalone --nproc-per-node 2 examples/all_reduce.py [EPOCHS]

The loop is the same under both launchers: on one machine the workers share memory, under torchrun they use Gloo and may be on
several machines. Two workers with batches of 16 make the updates of one with batches of 32.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


def train() -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f} with {worker.num_workers} workers", flush=True)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # torchrun has started the workers
        train()
    else:
        result = pl.launch(train, workers=2, algorithm="all-reduce").result
        print(f"{result['steps']} updates of {result['samples']} samples, staleness {result['staleness']['max']}")
