"""A parameter server: synchronous with a backup worker, asynchronous, with bounded clocks; one worker is ten times as slow.

    python examples/parameter_server.py [EPOCHS]
    torchrun --standalone --nproc-per-node 3 examples/parameter_server.py [EPOCHS]

With a backup, a step takes the first three of four gradients and drops the late one; asynchronously every gradient counts, and
the slow worker's are stale; with bounded clocks nobody gets more than four steps ahead of it. The optimizer below never steps
here: the server takes its class and its rates, and applies gradients with it, so a scheduler works as ever. Under torchrun,
worker 0 hosts the server.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 20
BACKUP = pl.ParameterServer(mode=pl.Sync(backups=1))
ASYNC = pl.ParameterServer(mode=pl.Async(), shards=2)
BOUNDED = pl.ParameterServer(mode=pl.Bounded(clock_bound=4))


def train() -> None:
    model, loader = make_model(), make_loader(batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    with pl.attach(model, optimizer) as worker:
        for _ in range(EPOCHS):
            for images, labels in worker.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                worker.report(loss)
            scheduler.step()
    if worker.worker_id == 0:
        print(f"test accuracy {accuracy(model):.3f}", flush=True)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # torchrun has started the workers
        os.environ.setdefault("PACELINE_ALGORITHM", pl.spec(ASYNC))
        train()
    else:
        pl.launch(train, workers=3, algorithm=ASYNC)
        cluster = pl.Cluster(workers=4, compute_s=0.002).slow(worker=0, factor=10)
        for algorithm in (pl.ParameterServer(), BACKUP, ASYNC, BOUNDED):
            result = pl.simulate(train, cluster=cluster, algorithm=algorithm).result
            print(
                f"{pl.spec(algorithm)}: {result['steps']} updates in {result['wall_s']:.2f} s of virtual time,", end=" "
            )
            print(f"{result['dropped_updates']} gradients dropped, mean staleness {result['staleness']['mean']:.2f}")
