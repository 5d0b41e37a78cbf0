"""Lock-based asynchronous SGD: copy under a lock, compute, update under the lock; a mutex against a read-write lock.

    python examples/locked.py [EPOCHS]

Copies exclude each other under the mutex, not under the read-write lock. With a back-off, workers do not queue: they try,
and wait a random time, counted in update times, after each failure.
"""

import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def train() -> None:
    model, loader = make_model(), make_loader(batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    for algorithm in (pl.Locked(), pl.Locked(kind="rwlock"), pl.Locked(backoff=pl.ExponentialBackoff(cap=16))):
        print(f"\n{pl.spec(algorithm)}")
        result = pl.launch(train, workers=2, algorithm=algorithm).result
        print(f"{result['samples_per_s']:,.0f} samples/s, waiting {result['waiting_share']:.1%} of the time")
        print(f"staleness: {result['staleness']['mean']:.2f} on average, {result['staleness']['max']} at most")
