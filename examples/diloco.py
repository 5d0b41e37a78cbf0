"""DiLoCo: many local steps, then an outer optimizer steps with the mean of what all workers have changed; and streaming.

    python examples/diloco.py [EPOCHS]
    torchrun --standalone --nproc-per-node 3 examples/diloco.py [EPOCHS]

The same loop on three processes, and on four simulated machines with a slow link between them. Streaming DiLoCo sends the
model in fragments, one after the other, and merges each four steps after it left: it needs the same bytes, and waits for none.
"""

import os
import sys

import torch
from torch import nn

import paceline as pl
from digits import accuracy, make_loader, make_model

EPOCHS = int(sys.argv[1]) if sys.argv[1:] else 20
DILOCO = pl.DiLoCo(period=20)
STREAMING = pl.DiLoCo(period=20, fragments=4, delay=4)
LOCAL = pl.DiLoCo(period=20, outer=pl.OuterSGD(rate=1.0))  # without an outer optimizer: local SGD


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
        os.environ.setdefault("PACELINE_ALGORITHM", pl.spec(STREAMING))
        train()
    else:
        pl.launch(train, workers=3, algorithm=DILOCO)
        cluster = pl.Cluster(workers=4, compute_s=0.002, bandwidth_bytes_per_s=5e6, latency_s=3e-4)
        for algorithm in (pl.AllReduce(), LOCAL, DILOCO, STREAMING):
            result = pl.simulate(train, cluster=cluster, algorithm=algorithm).result
            sent = f"{result['bytes_per_step'] / 1e3:.1f} KB sent per gradient"
            print(f"{pl.spec(algorithm)}: {result['wall_s']:.3f} s of virtual time, {sent}")
