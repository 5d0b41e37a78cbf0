"""Downpour SGD with a warm start, talking after every step or every fifth; and AdaptiveRevision.

    python examples/downpour.py [EPOCHS]
    torchrun --standalone --nproc-per-node 3 examples/downpour.py [EPOCHS]

For the first 50 steps one worker trains alone. With fetch=5, push=5 a worker takes four of five steps by itself, with the
optimizer below, and sends five gradients as one. AdaGrad at the server uses the optimizer's learning rate, which is smaller
than SGD's would be: 0.02.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 20
OFTEN = pl.Downpour(warm_start_steps=50)
SELDOM = pl.Downpour(fetch=5, push=5, warm_start_steps=50)
REVISED = pl.AdaptiveRevision()


def train() -> None:
    model, loader = make_model(), make_loader(batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
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
    if "WORLD_SIZE" in os.environ:  # torchrun has started the workers
        os.environ.setdefault("PACELINE_ALGORITHM", pl.spec(SELDOM))
        train()
    else:
        pl.launch(train, workers=3, algorithm=SELDOM)
        cluster = pl.Cluster(workers=8, compute_s=0.002)
        for algorithm in (OFTEN, SELDOM, REVISED):
            result = pl.simulate(train, cluster=cluster, algorithm=algorithm).result
            print(
                f"{pl.spec(algorithm)}: {result['steps']} updates of {result['computed_gradients']} gradients", end=" "
            )
            print(f"in {result['wall_s']:.2f} s of virtual time,", end=" ")
            print(f"{result['bytes_per_step'] / 1000:.0f} KB sent per gradient")
