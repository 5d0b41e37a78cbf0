"""Synchronous SGD: every step waits for all workers, so one slow worker slows all of them.

    python examples/lockstep.py [EPOCHS]

Worker 0 sleeps 3 ms in every step, as if its machine were busy. Compare the waiting of the others with what
examples/leashed.py prints for the same straggler.
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
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
    result = pl.launch(train, workers=3, algorithm="lockstep").result
    print(f"{result['steps']} updates of {result['samples']} samples in {result['wall_s']:.2f} s")
    print(f"staleness: {result['staleness']['mean']:.1f} on average, for everybody waits for everybody")
    shares = ", ".join(f"{share:.0%}" for share in result["waiting_share_per_worker"])
    print(f"share of the time spent waiting, workers 0, 1, 2: {shares}")
