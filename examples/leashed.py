"""Leashed-SGD: workers publish whole vectors by one compare-and-swap, and nobody waits for a slow one.

    python examples/leashed.py [EPOCHS]

Worker 0 sleeps 3 ms in every step, as in examples/lockstep.py; the batches that it does not take go to the others.
With persistence=0 a gradient that lost its race is dropped, so nothing happens between a gradient and its update.
"""

import sys
import time

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


def train() -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                if worker.worker_id == 0:
                    time.sleep(0.003)
                optimizer.step()
                worker.report(loss)
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f}", flush=True)


if __name__ == "__main__":
    for algorithm in (pl.Leashed(), pl.Leashed(persistence=0, backoff=pl.ExponentialBackoff())):
        print(f"\n{pl.spec(algorithm)}")
        result = pl.launch(train, workers=3, algorithm=algorithm).result
        stale = result["staleness"]
        shares = ", ".join(f"{share or 0:.0%}" for share in result["waiting_share_per_worker"])
        print(f"{result['steps']} updates of {result['samples']} samples in {result['wall_s']:.2f} s")
        print(f"updates by workers 0, 1, 2: {result['updates_per_worker']}; waiting: {shares}")
        print(f"staleness: {stale['mean']:.2f} on average, of it after the gradient {stale['mean_after_gradient']:.3f}")
        print(f"lost races: {result['failed_publishes']}, dropped gradients: {result['dropped_updates']}")
