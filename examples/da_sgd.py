"""DaSGD: averages that arrive some steps late, so that nobody waits for the network.

    python examples/da_sgd.py [EPOCHS]
    torchrun --standalone --nproc-per-node 3 examples/da_sgd.py [EPOCHS]

The same loop on three processes, and on four simulated machines whose average takes longer than a step: local SGD waits for
it, DaSGD goes on training meanwhile. What a worker has learnt by the time the average arrives is mostly dropped by the paper's
merge, which the learning rate makes up for, and kept by `merge=corrected`.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 20
LOCAL = pl.LocalSGD(period=4)
LATE = pl.DaSGD(period=8, delay="auto")
CORRECTED = pl.DaSGD(period=4, delay=3, merge="corrected")


def train() -> None:
    model, loader = make_model(), make_loader(batch_size=8)
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
    if "WORLD_SIZE" in os.environ:  # torchrun has started the workers
        os.environ.setdefault("PACELINE_ALGORITHM", pl.spec(CORRECTED))
        train()
    else:
        pl.launch(train, workers=3, algorithm=CORRECTED)
        cluster = pl.Cluster(workers=4, compute_s=0.002, bandwidth_bytes_per_s=1.25e7, latency_s=2e-4)
        for algorithm in (LOCAL, LATE, CORRECTED):
            result = pl.simulate(train, cluster=cluster, algorithm=algorithm).result
            late = f"{result.get('delay', 0)} steps late, progress factor {result.get('progress_factor', 1.0):.2f}"
            print(f"{pl.spec(algorithm)}: {result['wall_s']:.3f} s of virtual time, averages {late}")
